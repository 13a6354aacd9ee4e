"""The package's version, read by the build and by `attnflow.__version__`."""

__version__ = "0.1.0"
