"""What every test process needs."""

import os
import signal

# A shell starts background jobs with interrupts ignored; the tests of Ctrl-C need them.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tables are as wide as they are, whatever the shell says of a terminal.
os.environ.pop("COLUMNS", None)
