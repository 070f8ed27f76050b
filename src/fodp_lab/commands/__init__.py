"""`fodp reproduce | report | bench`: found by the entry points of this package, if the extra `lab` is installed."""

from fodp.cli.commands import Command
from fodp.support.extras import need
from fodp_lab.commands import bench, report, reproduce

for _module in ("filelock", "jinja2", "matplotlib", "pooch", "sklearn"):
    need(_module, "the laboratory (fodp reproduce, report and bench)", extra="lab")

REPRODUCE = Command(
    "reproduce",
    "Run the paper's experiments, or the fair comparison.",
    reproduce.options,
    reproduce.run,
    reproduce.EPILOG,
)
REPORT = Command("report", "Tables, figures and one HTML page from the records.", report.options, report.run)
BENCH = Command(
    "bench", "Time private steps beside plain ones and other libraries.", bench.options, bench.run, bench.EPILOG
)
