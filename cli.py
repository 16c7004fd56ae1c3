"""Launcher for a checkout: ``python cli.py …`` is the same program as ``mla-convert …``."""

from mla_convert.__main__ import leave_checkout, main

leave_checkout()  # Python has put it on sys.path, where its folder kernels would shadow Hugging Face's package

if __name__ == "__main__":
    main()
