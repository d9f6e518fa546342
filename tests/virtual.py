"""Jobs of virtual ranks, in one process: a thread for each process that hosts some."""

from aligned_ranks import on_ranks
from elastic import make

from odb_nodes import pop_step_info


def job(processes, virtual_ranks=4, *, states=None, steps=None, epochs=1, make=make, **options):
    """Of each process: its batches, as (info, ids), and the states around them.

    Args:
        processes: number of processes.
        virtual_ranks: number of virtual ranks; None: the processes themselves are the ranks.
        states: a state of each process; None begins.
        steps: after how many steps of the virtual ranks to stop; None: after the last epoch.
        epochs: how many epochs, or rests of one, to take.
    """

    def run(exchange):
        loader = make(exchange, virtual_ranks=virtual_ranks, **options)
        if states is not None:
            loader.load_state_dict(states[exchange.rank])
        found, saved = [], [loader.state_dict()]
        for _ in range(epochs):
            for batch in loader:
                info = pop_step_info(batch)
                found.append((info, [] if info.is_filler else batch["id"].tolist()))
                saved.append(loader.state_dict())
                assert loader.step == info.step + 1
                if len(found) == (steps and steps * info.batches_per_step):
                    loader.close()
                    return found, saved
        loader.close()
        return found, saved

    return on_ranks(processes, run)


def steps_of(processes):
    """What each virtual rank has at each step, the same whichever process hosts it."""
    found = {}
    for process, (batches, _) in enumerate(processes):
        for info, ids in batches:
            hosted = info.batches_per_step
            step, number = divmod(info.step, hosted)
            found[info.epoch, step, process * hosted + number] = (
                ids,
                info.left_out,
                info.micro_step // hosted,
                info.micro_steps // hosted,
                (info.optimizer_samples, info.optimizer_targets, info.all_samples_this_step),
                info.loss_scale / len(processes),
            )
    return found
