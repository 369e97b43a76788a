"""A training run from the command line to its end, whatever the parallelism: what both entry scripts share."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from data_prep.errors import InputError
from data_prep.loader import StepLoader
from monitoring.metrics import MetricsWriter, StepClock, step_line
from recipes import models
from recipes.training import checkpoint_files, distributed, faults, guards, parents, probe, run_directory
from recipes.training.prepare import Prepared, prepare, training_stream, validation_stream
from recipes.training.recipe_file import recipe_parser

logger = logging.getLogger("recipes")


@dataclass(frozen=True)
class Method:
    """How one way of training builds its engine, takes a step, and validates.

    Attributes:
        build_engine: prepared -> engine, its weights drawn or loaded.
        train_step: engine, StepBatch, sizes, flags -> step.StepResult.
        validate: engine, SampleStream, samples, sizes, data-parallel rank -> (nats a token, tokens).
    """

    build_engine: Callable
    train_step: Callable
    validate: Callable


def parse_arguments(description: str, argv: list[str] | None):
    parser = recipe_parser(description)
    parser.add_argument("--recipe", required=True, help="recipe YAML, or the name of one in recipes/")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="set by launchers; LOCAL_RANK comes first")
    return parser.parse_intermixed_args(argv)


def run(script: str, description: str, method: Callable[[], Method], argv: list[str] | None = None) -> int:
    """Run an entry script; returns the exit code.

    Args:
        script: its path in the repository.
        method: called once the process group is up; imports what is heavy.
    """
    try:
        arguments = parse_arguments(description, argv)
        place = distributed.find_place(arguments.local_rank)
        accelerator = distributed.choose_accelerator()
        node, first = place.local_world_size, place.rank == 0
        prepared = prepare(
            arguments, place.world_size, accelerator, content=first, script=script, devices_per_node=node
        )
        if place.rank == 0:
            run_directory.open_run_directory(prepared)
    except (InputError, ConnectionError) as error:
        return faults.refuse_before_start(error)
    watch = faults.FaultWatch(prepared.recipe.run_directory, place.rank)
    try:
        train(prepared, place, watch, method)
    except BaseException as error:
        watch.fail(error)
    watch.close()
    return 0


def train(prepared: Prepared, place: distributed.Place, watch: faults.FaultWatch, method: Callable[[], Method]) -> None:
    recipe, sizes = prepared.recipe, prepared.sizes
    device = distributed.start_process_group(place)
    watch.start(distributed.broadcast(str(uuid.uuid4())))
    run_directory.start_logging(recipe.run_directory, place.rank)
    logger.info("%s: %s", recipe.run_directory, sizes)

    # Heavy imports come after the process group: a mistake or a taken port is told before they are paid for.
    from recipes.training import checkpoint, light_state

    way = method()
    if (warning := probe.check_checkpoint_directory(recipe, prepared.ds_config, place.rank)) is not None:
        logger.warning(warning)
    resume_from = checkpoint.choose_or_fetch(recipe, prepared.ds_config, sizes)
    branch_from, source, parent = None, prepared, checkpoint_files.parent_asked_for(recipe)
    if resume_from is not None:
        if parent is not None:
            logger.info("begun from %s, this run has checkpoints of its own: it goes on from those", parent)
        parent = checkpoint_files.read_manifest(resume_from).get("parent")
    if resume_from is None and recipe.checkpoint.branch_from is not None:
        branch_from = parents.verified(recipe.checkpoint.branch_from)
    elif resume_from is None and recipe.checkpoint.start_from is not None:
        source = parents.with_parent_weights(prepared, place.rank)
    order_samples = checkpoint_files.order_samples(recipe, resume_from)
    stream = training_stream(recipe, order_samples)
    held_out = validation_stream(recipe)
    logger.info(stream.summary(recipe.total_steps * recipe.global_batch_size))
    if place.local_rank == 0:
        stream.prefetch()
    fingerprint = distributed.broadcast(stream.fingerprint() if place.rank == 0 else None)
    loaded_from = resume_from or branch_from
    engine = way.build_engine(source if loaded_from is None else without_source(prepared))
    checkpoint.seed_ranks(recipe.seed, 0, place.rank)
    progress = checkpoint.Progress()
    if loaded_from is not None:
        branch = branch_from is not None
        progress = checkpoint.resume(engine, recipe, sizes, loaded_from, fingerprint, branch)
        logger.info("resumed from %s; the next step is %d", loaded_from, progress.step + 1)
    total, metrics = recipe.total_steps, None
    if place.rank == 0:
        attempt = run_directory.record_start(prepared, device)
        metrics = MetricsWriter(recipe.run_directory, attempt, progress.step + 1, recipe.monitor.tensorboard)
    data_rank = sizes.data_rank(place.rank)
    sample_log = run_directory.SampleLog(recipe, place.rank)

    saver = checkpoint.Saver(engine, recipe, sizes, fingerprint, order_samples, parent)

    def validate() -> None:
        loss, tokens = way.validate(engine, *held_out, sizes, data_rank)
        logger.info("validation after step %d: loss %.4f over %s tokens", progress.step, loss, f"{tokens:,}")
        if metrics is not None:
            metrics.write(progress.step, {"validation_loss": loss, "validation_tokens": tokens})

    def due(every: int | None) -> bool:
        return progress.step == total or every is not None and progress.step % every == 0

    def read_from_here() -> StepLoader:
        return StepLoader(stream, sizes, data_rank, progress.consumed_samples, recipe.data.prefetch_steps)

    def save() -> None:
        if replicas is not None:
            replicas.check(progress.step)
        saver.save(progress)

    def roll_back(why: str) -> bool:
        """To the newest checkpoint, and on from there without the samples of this step; False where there is none."""
        nonlocal progress
        saver.finish()
        saved = distributed.broadcast(bool(checkpoint_files.checkpoints(saver.directory)))
        # Going back takes time: left to the start that takes this step again.
        if stopped and saved and progress.step < total:
            logger.warning("step %d: %s; not saved", progress.step, why)
            return True
        latest = replace(recipe, checkpoint=replace(recipe.checkpoint, resume="latest"))
        path = checkpoint.choose(latest)
        if path is None:
            logger.warning("step %d: %s; there is no checkpoint to go back to: going on", progress.step, why)
            return False
        if len(progress.left_out) >= recipe.guards.max_rollbacks:
            raise FloatingPointError(f"step {progress.step}: {why}, after {recipe.guards.max_rollbacks} rollbacks")
        spiked = [progress.consumed_samples - sizes.global_batch, progress.consumed_samples]
        left_out = [*progress.left_out, spiked]
        logger.warning(
            "step %d: %s; going back to %s, without samples %d to %d", progress.step, why, path.name, *spiked
        )
        progress = checkpoint.resume(engine, latest, sizes, path, fingerprint)
        progress.left_out = left_out
        spikes.restore(progress.recent)
        return True

    light = light_state.LightStates(recipe, sizes, place.rank, progress)
    if held_out is not None and progress.step == 0:
        validate()
    loader = read_from_here()
    flops = models.family(recipe.model.family).flops_per_token(recipe.model, recipe.data.seq_length)
    clock = StepClock(flops, sizes.world, recipe.monitor.peak_tflops)
    skips = faults.SkipGuard(recipe.guards.max_skipped_in_a_row)
    spikes = guards.SpikeDetector(recipe.guards)
    spikes.restore(progress.recent)
    replicas = guards.ReplicaCheck(engine) if recipe.guards.replica_check_every is not None else None
    if replicas is not None:
        replicas.check(progress.step)
    # A pipeline's step knows its loss only after the update.
    options = {"spikes": spikes.leaves_out} if recipe.guards.spike == "skip_step" else {}
    watchdog = guards.Watchdog(recipe.guards.watchdog_s, watch, sizes.world)
    distributed.barrier()  # from here on a signal no longer ends a rank, it asks all of them to save and leave
    signals, stopped, save_due = faults.StopSignals(), False, False

    while progress.step < total and not stopped:
        clock.start()
        if progress.pass_over():
            loader.close()
            loader = read_from_here()
        batch = loader.next()
        result = way.train_step(engine, batch, sizes, lambda: [signals.stop_requested(), *saver.flags()], **options)
        stopped, *saving = result.flags
        progress.advance(sizes.global_batch, result.tokens, result.applied)
        sample_log.write(progress.step, batch)
        values = {**progress.counters(), **result.metrics(), "data_wait_s": loader.wait_s, **clock.stop(result.tokens)}
        if metrics is not None and (due(recipe.monitor.log_every_steps) or not result.applied):
            metrics.write(progress.step, {**values, "memory_gib": run_directory.memory_gib()})
            logger.info(step_line(progress.step, total, values, clock.eta_s(total - progress.step)))
        spiked = spikes.see(progress.step, result)
        progress.recent = spikes.state()
        left_out = spiked is not None and recipe.guards.spike == "skip_step"  # the line of the spike says so
        if not result.applied and not left_out:
            ranks = ", ".join(map(str, result.bad_ranks)) or "none: the gradients alone"
            logger.warning("step %d had no update; ranks with a loss that is not finite: %s", progress.step, ranks)
        light.see(progress, metrics.position if metrics is not None else None)
        skips.check(progress.step, result.applied, left_out)
        saver.advance(*saving)
        if replicas is not None and progress.step % recipe.guards.replica_check_every == 0:
            replicas.check(progress.step)
        if spiked is not None and recipe.guards.spike == "rollback" and roll_back(spiked):
            loader.close()
            loader = read_from_here()
            watchdog.beat(progress.step)
            continue
        if stopped:  # before anything else: the time until the kill may be short
            if recipe.checkpoint.on_signal:
                save()
            saver.finish()
        if held_out is not None and due(recipe.validation.every_steps):
            validate()
        save_due |= saver.due(progress.step)
        # Not in a streak of steps without an update: its checkpoints would push out those before it.
        if save_due and not stopped and (result.applied or progress.step == total):
            save()
            save_due = False
        watchdog.beat(progress.step)

    saver.close(not stopped, lambda: watchdog.beat(progress.step))
    watchdog.close()
    loader.close()
    if place.rank == 0:
        metrics.close()
        run_directory.record_end(recipe, progress.step, signals.received)
    distributed.stop_process_group()


def without_source(prepared: Prepared) -> Prepared:
    """With weights drawn, not loaded from model.init_from: a resumed run needs neither, and the source may be gone."""
    model = replace(prepared.recipe.model, init_from=None)
    return replace(prepared, recipe=replace(prepared.recipe, model=model))
