"""All-reduces and exchanges that are carried out at wait(), or at once: both must give the same numbers."""

import torch.distributed as dist

from nanodomino.comm import collectives


class LateWork:
    """A wire that moves nothing until somebody waits."""

    def __init__(self, collective):
        self.collective = collective

    def wait(self):
        if self.collective:
            self.collective()
            self.collective = None


class EarlyWork:
    """A wire that was done before anybody looked."""

    def wait(self):
        pass


def delayed_collectives(when):
    """Collectives that are carried out at wait() ('late') or at once ('early'), as [(object, name, replacement)]."""
    sums, exchanges = dist.all_reduce, collectives.exchange

    def carry_out(collective):
        if when == "late":
            return LateWork(collective)
        collective()
        return EarlyWork()

    def all_reduce(*arguments, async_op=False, **options):
        return carry_out(lambda: sums(*arguments, **options)) if async_op else sums(*arguments, **options)

    def exchange(*arguments):
        return carry_out(lambda: exchanges(*arguments).wait())

    return [(dist, "all_reduce", all_reduce), (collectives, "exchange", exchange)]
