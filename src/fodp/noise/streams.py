"""Random streams keyed by (key, step, name): every random draw of a run comes from here.

One pipeline serves both modes: a keyed hash turns (key, step, name) into an AES-256 key, AES in counter mode
(ChaCha20 for normals on an accelerator) gives a keystream, and wide uniforms from the keystream become normals by the
method of Box and Muller. The modes differ only in where the key comes from:

* **secure** (the default): fresh operating-system entropy, kept in memory only. Nobody can tell masks and
  keystream from truly random ones without breaking AES-256 or BLAKE2b, or reading this process's memory.
* **seeded**: derived from a recorded seed, for research. Whoever knows the seed can subtract the noise and
  learn the masks, so a seeded run protects nobody; its privacy statement has to say so.

What is *not* defended, in either mode:

* **Floating point.** The normals are floats: not every real number can occur, and which sums of data and
  noise can occur differs between neighbouring data sets. Who sees exact releases may exploit this: Mironov
  (2012) for Laplace noise, Jin et al. (2022) for Gaussian noise made in pairs as here, DP-SGD included. The
  ε of a plan is that of the ideal Gaussian. Wide uniforms keep the tails right; they do not close this gap.
  `fodp.noise.exact` closes it by rounding sums and noise to one grid, at several times the cost of a draw.
* **Timing.** Each normal takes the same operations whatever its value, without rejection loops, but `log`,
  `sin` and `cos` promise no constant time, and the time of a whole step depends on the size of its lot.
* **Memory and snapshots.** The key lies in ordinary memory, where a core dump, a swapped page or a debugger
  finds it, and a virtual machine resumed twice from one snapshot draws the same numbers twice.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch

from fodp import kernels
from fodp.errors import PrivacyError
from fodp.noise import chacha
from fodp.noise.keystream import MARGIN, Keystream, encrypted
from fodp.support import checks
from fodp.support.forks import Owner

Array = npt.NDArray[Any]

# Pairs of normals made at a time: all scratch stays in a core's cache, and calls are few. The layout of a
# stream depends on it, so another value would change seeded runs.
PAIRS: Final = 32768
_ANGLE_WORDS: Final[dict[torch.dtype, np.dtype[Any]]] = {torch.float32: np.dtype("<i4"), torch.float64: np.dtype("<i8")}

_injected: ContextVar[bytes | None] = ContextVar("injected", default=None)


@contextmanager
def keyed_from(key: bytes) -> Iterator[None]:
    """Secure streams that are made in here take this key: for audits of secure runs, which are private no longer.

    Args:
        key: 32 bytes.

    Returns:
        A context manager.

    Raises:
        PrivacyError: the key has another length.

    Example:
        >>> with keyed_from(bytes(32)):
        ...     one, other = Streams.secure(), Streams.secure()
        >>> bool((one.words(3, 0, "masks") == other.words(3, 0, "masks")).all())
        True
    """
    if len(key) != 32:
        raise PrivacyError(f"a key has 32 bytes, got {len(key)}")
    token = _injected.set(key)
    try:
        yield
    finally:
        _injected.reset(token)


class Streams:
    """Independent random streams, one per (step, name), all from one key.

    The same (key, step, name) always gives the same numbers; different ones give streams that cannot be told
    from independent ones without the key. Normals, words and keys for records of one name are different streams too.

    A secure instance never gives the same normals or the same words twice: per name, steps have to increase
    strictly, for noise used on two lots cancels out and a mask used twice is not a fresh Poisson draw. It
    cannot be copied or pickled, its key is in no `repr`, and in a forked child it takes a fresh key before
    the first draw. A seeded instance may replay, and is no more than its seed.

    Seeded normals repeat bit for bit on machines of one kind; where a C compiler is missing, or NumPy uses other
    vector instructions or versions, the last bits may differ. Words and masks are the same everywhere.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = None if seed is None else checks.whole("seed", seed, minimum=0)
        self._key = (_injected.get() or secrets.token_bytes(32)) if self._seed is None else _key_of(self._seed)
        self._owner = Owner()
        self._last_step: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    @classmethod
    def secure(cls) -> Self:
        """Streams under a fresh key from the operating system, which is never written anywhere."""
        return cls()

    @classmethod
    def seeded(cls, seed: int) -> Self:
        """Streams anyone can repeat who knows the seed, of any length (every bit counts): for research."""
        return cls(checks.whole("seed", seed, minimum=0))

    @property
    def seed(self) -> int | None:
        """The seed, or None for secure streams."""
        return self._seed

    def normal_(self, out: torch.Tensor, std: float, step: int, name: str) -> torch.Tensor:
        """Fill `out` (float32 or float64) with independent draws from N(0, std²) and return it.

        On the CPU they come from AES, on other devices from ChaCha20 (`fodp.noise.chacha`), made where they are added:
        a seeded run on an accelerator draws other numbers than on the CPU.
        """
        checked = _checked(std, out.dtype)
        if out.device.type != "cpu":
            with torch.no_grad():
                return self.add_normal_(out.zero_(), std, step, name)
        bits = self._keystream("normal", step, name)
        with torch.no_grad():
            if checked == 0:
                return out.zero_()
            if out.is_contiguous():
                _fill_normal(out, checked, bits)
                return out
            host = torch.empty(out.shape, dtype=out.dtype)
            _fill_normal(host, checked, bits)
            return out.copy_(host)

    def add_normal_(self, out: torch.Tensor, std: float, step: int, name: str) -> torch.Tensor:
        """Add independent draws from N(0, std²) to `out`, on the device where it is, by ChaCha20: in one pass.

        For devices other than the CPU: its noise comes from AES, and these are other numbers.
        """
        checked = _checked(std, out.dtype)
        key = self._derive("chacha", step, name)
        if self._seed is None:
            self._claim("normal", step, name)
        with torch.no_grad():
            if out.is_contiguous():
                return chacha.add_normals_(out, checked, key)
            fresh = torch.zeros(out.shape, dtype=out.dtype, device=out.device)
            return out.add_(chacha.add_normals_(fresh, checked, key))

    def words(self, count: int, step: int, name: str) -> npt.NDArray[np.uint64]:
        """`count` independent uniform 64-bit words."""
        size = 8 * checks.whole("count", count, minimum=0)
        buffer = np.empty(size + MARGIN, dtype=np.uint8)
        self._keystream("words", step, name).fill(buffer, size)
        return buffer[:size].view("<u8")

    def words_of(self, blocks: npt.NDArray[np.uint8], step: int, name: str) -> npt.NDArray[np.uint64]:
        """A uniform 64-bit word for each block of 16 bytes, [n, 16]; whose blocks differ, their words are independent.

        The word of a block is that of (key, step, name, block) alone, whatever other blocks there are.
        """
        key = self._derive("block", step, name)
        if self._seed is None:
            self._claim("block", step, name)
        return encrypted(key, blocks).view("<u8")[:, 0]

    def record_key(self, step: int, name: str) -> bytes:
        """The key of what a step draws for its records (`fodp.draws`): dropout and the like, never noise or masks.

        Asking again gives the same key, in secure mode too: a record draws the same in every pass of a step.
        """
        return self._derive("record", step, name)

    def __repr__(self) -> str:
        return "Streams.secure()" if self._seed is None else f"Streams.seeded({self._seed})"

    def __reduce__(self) -> tuple[Callable[[int], "Streams"], tuple[int]]:
        # pickle, copy and deepcopy all come through here
        if self._seed is None:
            raise PrivacyError(
                "secure streams cannot be copied or pickled: a second holder of their key would repeat the "
                "noise; make new ones with Streams.secure()"
            )
        return type(self).seeded, (self._seed,)

    def _keystream(self, kind: str, step: int, name: str) -> Keystream:
        key = self._derive(kind, step, name)
        if self._seed is None:
            self._claim(kind, step, name)
        return Keystream(key)

    def _derive(self, kind: str, step: int, name: str) -> bytes:
        """32 bytes that belong to (key, kind, step, name) alone."""
        checks.whole("step", step, minimum=0)
        if not isinstance(name, str) or not name:
            raise PrivacyError(f"a stream's name must be a non-empty string, got {name!r}")
        if self._seed is None and not self._owner.is_here:
            # parent and child hold the same key: the child leaves it, or both would draw the same noise
            self._key, self._lock, self._owner = secrets.token_bytes(32), threading.Lock(), Owner()
        place = step.to_bytes(8, "little") + name.encode()
        return hashlib.blake2b(place, digest_size=32, key=self._key, person=f"fodp.{kind}".encode()).digest()

    def _claim(self, kind: str, step: int, name: str) -> None:
        """Record that this stream is used now; refuse what may have been used before."""
        with self._lock:
            last = self._last_step.get((kind, name), -1)
            if step <= last:
                raise PrivacyError(
                    f"secure stream {name!r} was already drawn up to step {last}, so step {step} may repeat "
                    "randomness; increase the step, use another name, or replay with Streams.seeded(seed)"
                )
            self._last_step[kind, name] = step


def radii(words: Array, wide: Array, out: Array) -> Array:
    """Radii √(-2 ln u) of pairs of normals, from 64-bit words seen as signed: u = (|word| + ½) / 2⁶³.

    u lies in [2⁻⁶⁴, 1], so radii reach 9.4 and the logarithm never sees a zero. `wide` is float64 scratch.
    """
    np.copyto(wide, words)
    np.abs(wide, out=wide)
    wide += 0.5
    wide *= 2.0**-63
    np.log(wide, out=wide)
    np.copyto(out, wide, casting="same_kind")
    out *= -2.0
    np.sqrt(out, out=out)
    return out


def angles(words: Array, out: Array) -> Array:
    """Angles in [-π, π] from signed 32-bit or 64-bit words."""
    np.copyto(out, words, casting="same_kind")
    out *= -np.pi / np.iinfo(words.dtype).min
    return out


class _Scratch(threading.local):
    """Reused memory, one per thread: NumPy leaves the interpreter lock, so threads must not share it."""

    def __init__(self) -> None:
        self.keystream = np.empty(16 * PAIRS + MARGIN, dtype=np.uint8)
        self.wide = np.empty(PAIRS)
        self.radius = np.empty(PAIRS)
        self.angle = np.empty(PAIRS)


_scratch = _Scratch()


def _fill_normal(out: torch.Tensor, std: float, bits: Keystream) -> None:
    """Fill a contiguous tensor: of each block, the first half takes r·cos(a), the second half r·sin(a)."""
    size, angle_type = out.numel(), _ANGLE_WORDS[out.dtype]
    compiled = kernels.library() if out.dtype == torch.float32 else None
    words = _scratch.keystream
    for start in range(0, size, 2 * PAIRS):
        count = min(2 * PAIRS, size - start)
        pairs = (count + 1) // 2
        length = pairs * (8 + angle_type.itemsize)
        bits.fill(words, length)
        if compiled is not None:
            compiled.normals(out, start, count, words, std)
        else:
            block = out.detach().view(-1).numpy()[start : start + count]
            _normals(block, std, words[: 8 * pairs].view("<i8"), words[8 * pairs : length].view(angle_type))


def _normals(block: Array, std: float, radius_words: Array, angle_words: Array) -> None:
    """The reference: what the compiled kernel does, in NumPy."""
    pairs = radius_words.size
    radius = radii(radius_words, _scratch.wide[:pairs], _scratch.radius.view(block.dtype)[:pairs])
    radius *= std
    angle = angles(angle_words, _scratch.angle.view(block.dtype)[:pairs])
    first, second = block[:pairs], block[pairs:]
    np.cos(angle, out=first)
    first *= radius
    np.sin(angle, out=angle)
    np.multiply(angle[: second.size], radius[: second.size], out=second)


def _checked(std: float, dtype: torch.dtype) -> float:
    """A standard deviation whose draws neither vanish nor overflow in `dtype`."""
    if dtype not in (torch.float32, torch.float64):
        raise PrivacyError(f"noise needs a float32 or float64 tensor, got {dtype}; draw in float32 and convert")
    checked: float = checks.at_least_zero("std", std)
    limits = torch.finfo(dtype)
    if checked > limits.max / 16 or 0 < checked < limits.tiny:
        raise PrivacyError(f"std {std!r} is out of the range of {dtype}; rescale the problem")
    return checked


def _key_of(seed: int) -> bytes:
    length = (seed.bit_length() + 7) // 8
    return hashlib.blake2b(seed.to_bytes(length, "little"), digest_size=32, person=b"fodp.key").digest()
