"""Last module of a server's: processes that are forked from it do not look at what it has loaded for garbage."""

import gc

gc.freeze()
