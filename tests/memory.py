"""How much memory a process of its own has taken at most."""

# Source for such a process: `ru_maxrss` would not do, because Linux hands the parent's peak down to it.
PEAK = """
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
"""
