"""Keep the old names of two modules of ``vpipe.visualize`` importable: vpipe.draw.summary and vpipe.draw.text."""

import sys

from vpipe.visualize import summary
from vpipe.visualize import terminal as text

sys.modules |= {"vpipe.draw.summary": summary, "vpipe.draw.text": text}
