"""What a private pass draws for an example: a function of (key, step, record, draw) and of nothing else.

Dropout masks of a lot, drawn row after row from PyTorch's generator, tie the examples together: one record more
shifts every later row's mask, and the gradients of all of them move. Here a pass runs under a dispatch mode
that answers PyTorch's random operations itself. Rows that lie along the lot's dimension are keyed by the record they
belong to, other draws by the step. So a row draws the same whoever else is in the lot, in micro-batches, alone, after a
resume and in another process; with secure streams nobody without the run's key can tell what.

The words are AES-256 of explicit counters: (record, number of the draw, place within the record's part). A place is
made of one index per dimension, so it does not depend on how far other records stretch the tensor by padding.

Which dimension of a draw is the lot's cannot be seen from one pass. A `Site` (a loss, an augmentation, a collate
function) is run on two and on three copies of one row: what grows is the lot's. Where that does not tell, a site is
run one record at a time, and everything it draws is that record's.
"""

from fodp.draws.generators import Marks, generators_kept
from fodp.draws.passes import OwnPass, Pass, Site
from fodp.draws.source import Source, Unkeyable

__all__ = ["Marks", "OwnPass", "Pass", "Site", "Source", "Unkeyable", "generators_kept"]
