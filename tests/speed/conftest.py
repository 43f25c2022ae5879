"""Keeps torch's structured trace, thousands of empty lines, out of what a failure shows."""

import logging

logging.getLogger("torch.__trace").propagate = False
