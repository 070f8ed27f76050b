"""UCI's Adult: the public schema of its columns, and a reader of its two files.

Values are those of `adult.names`, which the data set's authors publish beside the data. Bounds are what anybody may
assume: ages of 0 to 100, hours of 0 to 99 a week, and for capital what the codes have room for. `fnlwgt`, a weight of
the census, is not used.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.errors import DataError

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

# The values of a column, separated by spaces.
_VALUES = {
    "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
    "education": "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters "
    "1st-4th 10th Doctorate 5th-6th Preschool",
    "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
    "Married-AF-spouse",
    "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
    "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv Armed-Forces",
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "sex": "Female Male",
    "native-country": "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India "
    "Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland "
    "France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand "
    "Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands",
    "income": "<=50K >50K",
}
_BOUNDS = {
    "age": [0, 100],
    "education-num": [1, 16],
    "capital-gain": [0, 99999],
    "capital-loss": [0, 9999],
    "hours-per-week": [0, 99],
}
NAMES = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip
SCHEMA: dict[str, Any] = {
    "missing": ["?"],
    "columns": {
        **{name: {"bounds": bounds} for name, bounds in _BOUNDS.items()},
        **{name: {"values": values.split()} for name, values in _VALUES.items()},
    },
}


def read(path: Path) -> dict[str, list[str]]:
    """Read `adult.data` or `adult.test` into columns of texts, as UCI serves them or with a header line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise DataError(f"cannot read {path} ({reason}): fetch it again") from None
    columns: dict[str, list[str]] = {name: [] for name in NAMES}
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith(("|", "age,")):
            continue  # UCI's comment, or the header
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(NAMES):
            raise DataError(
                f"line {number} of {path} has {len(cells)} cells and not {len(NAMES)}: fetch the file again"
            )
        cells[-1] = cells[-1].removesuffix(".")  # of the test file
        for name, cell in zip(NAMES, cells, strict=True):
            columns[name].append(cell)
    return columns


def encoded(columns: dict[str, list[str]]) -> "TensorDataset":
    """Inputs (numbers to [-1, 1], one place for each value) and classes, each row by itself."""
    from fodp.data.tables import from_table

    return from_table(columns, SCHEMA, "income", public_size=1).train
