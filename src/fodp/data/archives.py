"""The official archives: where they are, what they must hash to, and how they are fetched."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fodp.errors import DataError
from fodp.support.extras import need


@dataclass(frozen=True)
class Archive:
    """One official file. The checksum is SHA-256, since SVHN is served without encryption."""

    file: str
    url: str
    sha256: str


ARCHIVES = {
    "cifar10": (
        Archive(
            "cifar-10-python.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
    ),
    "cifar100": (
        Archive(
            "cifar-100-python.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
    ),
    "svhn": (
        Archive(
            "train_32x32.mat",
            "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
            "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        ),
        Archive(
            "test_32x32.mat",
            "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
            "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
        ),
    ),
    "mnist": tuple(
        Archive(file, f"https://ossci-datasets.s3.amazonaws.com/mnist/{file}", sha256)
        for file, sha256 in (
            ("train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            ("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            ("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            ("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        )
    ),
    "fashion-mnist": tuple(  # under a name of its own each: the official names are those of MNIST's files
        Archive(f"fashion-{file}", f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{file}", sha256)
        for file, sha256 in (
            ("train-images-idx3-ubyte.gz", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            ("train-labels-idx1-ubyte.gz", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            ("t10k-images-idx3-ubyte.gz", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            ("t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        )
    ),
    "imdb": (
        Archive(
            "aclImdb_v1.tar.gz",
            "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
        ),
    ),
    "sst2": (
        Archive(
            "SST-2.zip",
            "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip",
            "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa",
        ),
    ),
    "adult": tuple(
        Archive(file, f"https://archive.ics.uci.edu/ml/machine-learning-databases/adult/{file}", sha256)
        for file, sha256 in (
            ("adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
            ("adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
        )
    ),
}
ARCHIVES["cifar10-full"] = ARCHIVES["cifar10"]


def cache_folder() -> Path:
    """The user's cache, where a download is kept for the next time."""
    import pooch

    return Path(pooch.os_cache("fodp"))


def fetch(name: str, *, progress: bool) -> list[Path]:
    """Download the archives of a data set, or find them in the cache; both only with the right checksum."""
    need("pooch", f"downloading {name}", extra="data")
    return [_fetch_one(archive, progress) for archive in ARCHIVES[name]]


def _fetch_one(archive: Archive, progress: bool) -> Path:
    import pooch

    bar = _Bar(archive.file) if progress and not (cache_folder() / archive.file).exists() else None
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("WARNING")  # the bar says what is being fetched
    try:
        return Path(
            pooch.retrieve(
                archive.url,
                known_hash=f"sha256:{archive.sha256}",
                fname=archive.file,
                path=cache_folder(),
                downloader=pooch.HTTPDownloader(progressbar=bar or False, timeout=30),
            )
        )
    except (OSError, ValueError) as error:  # requests' errors are OSErrors, a wrong checksum is a ValueError
        raise DataError(
            f"could not download {archive.url} ({_reason(error)}); get {archive.file} another way and name "
            "its folder with data_dir, --data-dir or FODP_DATA"
        ) from error
    finally:
        logger.setLevel(level)
        if bar:
            bar.close()


def _reason(error: Exception) -> str:
    if "hash of downloaded file" in str(error):
        return "what arrived does not have the official checksum and was thrown away"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"the server answered {status}"
    if isinstance(error, PermissionError):
        return f"cannot write to {cache_folder()}"
    return type(error).__name__


class _Bar:
    """What pooch wants of a progress bar (`total`, `update`, `reset`, `close`), drawn by rich on stderr."""

    def __init__(self, file: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns: tuple[Any, ...] = (
            TextColumn("downloading {task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(file, total=None)
        self._progress.start()

    @property
    def total(self) -> float | None:
        """Bytes to expect; pooch sets it when the server has told."""
        return self._progress.tasks[0].total

    @total.setter
    def total(self, value: int) -> None:
        self._progress.update(self._task, total=value)

    def update(self, amount: int) -> None:
        """Some more bytes have arrived."""
        self._progress.update(self._task, advance=amount)

    def reset(self) -> None:
        """Back to zero: pooch does so before it fills the bar at the end."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Leave the terminal in order, also after a failure."""
        self._progress.stop()
