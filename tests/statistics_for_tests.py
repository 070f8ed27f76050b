"""P-values for streams of noise, and streams whose words are chosen."""

import numpy as np
from scipy import stats

# Seeds are fixed where ACCEPT is used; fresh secure streams are judged at REJECT, a false alarm in a thousand million.
ACCEPT, REJECT = 1e-3, 1e-9


def two_sided(probability_below: float) -> float:
    return 2 * min(probability_below, 1 - probability_below)


def variance_p(sample: np.ndarray, std: float) -> float:
    return two_sided(float(stats.chi2.cdf(np.sum((sample / std) ** 2), sample.size)))


def variance_power(count: int, ratio: float, level: float) -> float:
    """The probability that `variance_p` falls below `level` when the true std is `ratio` times the claim."""
    low, high = stats.chi2.ppf([level / 2, 1 - level / 2], count)
    return float(stats.chi2.cdf(low / ratio**2, count) + stats.chi2.sf(high / ratio**2, count))


def exceedance_p(found: int, count: int, probability: float) -> float:
    return float(stats.binomtest(found, count, probability).pvalue)


def correlation_p(first: np.ndarray, second: np.ndarray) -> float:
    return float(stats.pearsonr(first, second).pvalue)
