"""Has the names that core/data.py imports, as core/ranks.py of size=small has them."""

from ..launching.distributed import RankContext as Rank  # noqa: F401 - for core/data.py
from ..launching.distributed import all_reduce  # noqa: F401
from ..launching.processes import num_usable_cores, start_worker  # noqa: F401
