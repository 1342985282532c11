"""`graphshard repro`: run one pass on a dumped stage, in one process, and compare with the stage that followed."""

from __future__ import annotations

import argparse
import difflib

from graphshard.codec.program_format import next_pass_of
from graphshard.codec.stage_format import plan_of
from graphshard.debug.show import StageFile, import_all, import_module, print_diff
from graphshard.errors import ArgumentError, PassError
from graphshard.ir.collapse_repeats import fold
from graphshard.ir.program import Program
from graphshard.passes import Pass
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.pipeline import DEFAULT_PASSES, run_pass
from graphshard.utils.text import brief, say


def run_repro(args: argparse.Namespace) -> int:
    """Run `graphshard repro STAGE`: run one pass, print what it changed, and return the exit status."""
    import_all(args.imports)
    stage = StageFile.at(args.stage)
    program = stage.program()
    step, origin = _choose(stage, args.step)
    before = stage.printed(program)
    observer = Observer(args.verify)
    try:
        _check_stage(program, stage, observer)
        run_pass(step, program, observer)
    except PassError as error:
        say(f"{step.name} on {stage.path}: failed\n{error}")
        return 1
    done, shown = program.history[-1], str if args.full else fold
    say(f"{step.name} ({origin}) on {stage.path}: {done.rewrites} rewrites in {done.seconds:.2f} s")
    say("rules: not checked" if args.verify != "each" else "rules: all hold, before and after the pass")
    say(_comparison(stage, step, program))
    print_diff(shown(before), shown(done.text), stage.path.stem, f"after {step.name}")
    return 0


def _check_stage(program: Program, stage: StageFile, observer: Observer) -> None:
    """Verify the stage itself, so that the pass is not blamed for a rule that its input breaks."""
    try:
        observer.after(program, stage.name or stage.path.stem, 0, 0.0)
    except PassError as error:
        raise PassError(f"the stage itself breaks a rule, before the pass runs: {error}") from error
    except Exception as error:
        raise PassError(f"the stage cannot be checked: {type(error).__name__}: {error}") from error


def _choose(stage: StageFile, wanted: str | None) -> tuple[Pass, str]:
    """Return the pass to run, and its origin in words."""
    recorded = next_pass_of(stage.json())
    if wanted is not None and ":" in wanted:
        return _imported(wanted), "given"
    default = {step.name: step for step in DEFAULT_PASSES}
    if recorded is not None and wanted in (None, recorded.name):
        if recorded.step is not None:
            return recorded.step, "as it ran"
        if wanted is None:
            raise ArgumentError(
                f"{stage.path}: the next pass, {recorded.name!r}, cannot be made again: {recorded.problem}. "
                f"Give --pass {recorded.class_name}, or one of {', '.join(default)}."
            )
    if wanted is None:
        names = ("capture", *default)
        if stage.name not in names[:-1]:
            raise ArgumentError(
                f"{stage.path}: no pass follows {stage.name or 'this stage'!r}. "
                f"Give --pass, one of {', '.join(default)}, or package.module:ClassName."
            )
        wanted = names[names.index(stage.name) + 1]
    if wanted not in default:
        close = difflib.get_close_matches(wanted[:100], default, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ArgumentError(f"--pass: the default pipeline has no {brief(wanted)}, it has {', '.join(default)}.{hint}")
    return default[wanted], "with default options"


def _imported(name: str) -> Pass:
    module_name, _, class_name = name.partition(":")
    found: object = import_module(module_name, "--pass")
    for attribute in class_name.split("."):
        found = getattr(found, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise ArgumentError(
            f"--pass: {module_name} has no pass {brief(class_name)}; a pass derives from graphshard.Pass."
        )
    try:
        return found()
    except Exception as error:
        raise ArgumentError(f"--pass: {name} cannot be made without arguments: {error}") from None


def _comparison(stage: StageFile, step: Pass, program: Program) -> str:
    """Compare the result with the dump's next stage: the text, and the plan, which the text does not show."""
    following = stage.neighbor(1)
    if following is None or following.name != step.name:
        return f"the dump holds no stage of {step.name} to compare with"
    if following.text().strip() != fold(program.history[-1].text).strip():
        return f"{following.path}: another text than the pass made here"
    if following.path.with_suffix(".json").exists() and plan_of(following.json()) != program.plan:
        return f"{following.path}: the same text, but another plan than the pass made here"
    return f"{following.path}: the same"
