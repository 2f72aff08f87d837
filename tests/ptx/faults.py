"""What the emulator raises."""


class Fault(Exception):
    """A kernel did what it must not do; the message says where."""


class UnknownInstruction(Exception):
    """The emulator does not know an instruction: a gap in it, not a fault of the kernel."""
