"""What every test process needs."""

import signal

# A shell starts background jobs with interrupts ignored; the tests of Ctrl-C need them.
signal.signal(signal.SIGINT, signal.default_int_handler)
