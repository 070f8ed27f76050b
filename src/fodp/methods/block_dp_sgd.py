"""Block-DP-SGD: DP-SGD with the shape fan-in, where layers with many inputs get a smaller share of each gradient."""

from types import MappingProxyType

from fodp.methods.dp_sgd import DPSGD


class BlockDPSGD(DPSGD):
    """The gradient of block l times b_l = min(1, √(w/inputs of l)), clipped as a whole; the release times b_l again.

    The name that DP-SGD with `shape="fan-in"` had before every method could have it (`fodp.options.scaling`). b is
    public, made of shapes alone, so sensitivity and event (q, σ) are DP-SGD's.
    """

    name = "block-dp-sgd"
    summary = "DP-SGD with public weights per layer, before clipping and again after the release."
    reference = "This library; of the family of group-wise clipping (He et al., ICLR 2023)"
    advice = "Where the first layer is much wider than the others; `shape='fan-in'` gives it to every method."
    defaults = MappingProxyType({"shape": "fan-in"})
