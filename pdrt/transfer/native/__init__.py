"""Compiled with pdrt where there is a C++ compiler; see `pdrt.transfer.host_copy`."""
