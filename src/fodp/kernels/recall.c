/* The pass over a memory, for rows of float and rows of bfloat16. */
#include "common.h"

static inline float widened(uint16_t bfloat16) {
    uint32_t bits = (uint32_t)bfloat16 << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define RECALL fodp_recall
#define ENTRY float
#define WIDE(entry) (entry)
#include "recall.h"

#define RECALL fodp_recall_bfloat16
#define ENTRY uint16_t
#define WIDE(entry) widened(entry)
#include "recall.h"
