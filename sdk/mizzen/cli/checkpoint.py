"""Commands about a checkpoint root. All but `prune` and `repair` only read, and none but `repair` takes a claim."""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mizzen.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MissingCheckpointError,
    MissingLibraryError,
)
from mizzen.checkpoint.log import Log
from mizzen.checkpoint.lost_records import repair
from mizzen.checkpoint.manifest import Manifest, Part
from mizzen.checkpoint.place import Best, Retention
from mizzen.checkpoint.reader import Skipped
from mizzen.checkpoint.removal import outdated, prune
from mizzen.checkpoint.root_copy import copy_checkpoint
from mizzen.checkpoint.root_view import Checkpoints, Problem, open_checkpoints
from mizzen.checkpoint.roots import open_root
from mizzen.cli import amounts
from mizzen.cli.exits import Exit
from mizzen.cli.export import export, prepared
from mizzen.cli.parser import Parser
from mizzen.cli.printer import Column, ProgressLine, cell, emit_list, emit_one, say, table
from mizzen.cli.values import Failure, UsageError, whole
from mizzen.objects.store import ObjectStore

_LS = (
    Column("STEP", lambda c: c["step"], right=True),
    Column("ATTEMPT", lambda c: c["attempt"], drop=2, right=True),
    Column("SAVE", lambda c: c["save"], drop=3, right=True),
    Column("SAVED (UTC)", lambda c: _clock(c), drop=4),
    Column("AGE", lambda c: amounts.between(c["created_at"], None), drop=1, right=True),
    Column("SIZE", lambda c: amounts.size(c["size_bytes"]), right=True),
    Column("RANKS", lambda c: c["ranks"], drop=5, right=True),
    Column("INTACT", lambda c: _wrong(c["problems"]) or "yes", flexible=True),
)
_PARTS = (
    Column("PART", lambda p: p["name"]),
    Column("RANK", lambda p: "all" if p["rank"] is None else p["rank"], drop=3, right=True),
    Column("KIND", lambda p: p["kind"], drop=2),
    Column("SIZE", lambda p: amounts.size(p["size_bytes"]), right=True),
    Column("CHECKSUM", lambda p: p["checksum"], drop=4),
    Column("SHARED WITH", lambda p: ", ".join(p["shared_with"]), drop=5, flexible=True),
    Column("PROBLEM", lambda p: p["problem"], flexible=True),
)
_TENSORS = (
    Column("TENSOR", lambda t: t["name"], flexible=True),
    Column("TYPE", lambda t: t["dtype"]),
    Column("SHAPE", lambda t: "x".join(str(length) for length in t["shape"]) or "scalar", right=True),
    Column("SIZE", lambda t: amounts.size(t["size_bytes"]), right=True),
)
_FILES = (
    Column("PART", lambda f: f["part"]),
    Column("RANK", lambda f: "all" if f["rank"] is None else f["rank"], right=True),
    Column("SIZE", lambda f: amounts.size(f["size_bytes"]), right=True),
    Column("FILE", lambda f: f["file"]),
)


@contextmanager
def _failing() -> Iterator[None]:
    """Convert an error of the checkpoint library to a `Failure` with its exit code."""
    try:
        yield
    except MissingCheckpointError as error:
        raise Failure(Exit.NOT_FOUND, str(error)) from error
    except CorruptCheckpointError as error:
        raise Failure(Exit.DAMAGED, str(error)) from error
    except (MissingLibraryError, ModuleNotFoundError) as error:
        raise Failure(Exit.USAGE, str(error)) from error
    except CheckpointError as error:
        raise Failure(Exit.UNAVAILABLE, str(error)) from error


def _open(uri: str) -> Checkpoints:
    try:
        return open_checkpoints(uri)
    except ValueError as error:
        raise UsageError(f"Invalid value for 'URI': {error}") from error


def _root(uri: str) -> ObjectStore:
    try:
        return open_root(uri)
    except ValueError as error:
        raise UsageError(f"Invalid value for 'URI': {error}") from error


def _ls(given: Namespace) -> int:
    with _failing():
        found = _open(given.uri)
        judged = found.survey()
    _say_records(found)
    items = [{**_summary(manifest), **_judgement(problems)} for manifest, problems in judged]
    emit_list(given, items, _LS, name=lambda item: str(item["name"]))
    return Exit.OK


def _show(given: Namespace) -> int:
    with _failing():
        found = _open(given.uri)
        manifest = found.get(given.step)
        judged = found.survey()
        problems = next((problems for known, problems in judged if known == manifest), [])
        wrong = {(problem.part, problem.rank): problem for problem in problems}
        others = [known for known, _ in judged if known != manifest]
        parts = [_part(found, part, others, wrong.get((part.name, part.rank))) for part in manifest.parts]
    body = {**_summary(manifest), **_judgement(problems), "root": found.root, "parts": parts}
    emit_one(given, body, lambda: _page(body), name=manifest.name)
    return Exit.OK


def _verify(given: Namespace) -> int:
    if given.all and given.step is not None:
        raise UsageError("'--step' and '--all' cannot be used together.")
    with _failing():
        found = _open(given.uri)
        records: tuple[Skipped, ...] = ()
        if given.all:
            with _progress(found.list()) as progress:
                judged = found.verify_all(progress=progress)
            records = found.damaged_records()
        else:
            judged = [_verified(found, given.step)]
            if given.step is None:
                # A damaged record after the newest checkpoint may have been a newer checkpoint.
                records = found.damaged_records(judged[0][0])
    items = [{**_summary(manifest), **_judgement(problems)} for manifest, problems in judged]
    for record in records:
        say(f"{found.root}: {record.name} is damaged: {record.reason}")
    if given.output == "name":
        for item in items:
            if not item["whole"]:
                print(cell(item["name"]))
    elif given.all and given.output in ("json", "yaml"):
        emit_list(given, items, ())
    elif not items:
        say("there are no checkpoints")
    else:
        page = "\n".join(line for item in items for line in _verdict(item))
        emit_one(given, items[0], lambda: page)
    return Exit.DAMAGED if records or not all(item["whole"] for item in items) else Exit.OK


def _verified(found: Checkpoints, step: int | None) -> tuple[Manifest, list[Problem]]:
    """Return the newest checkpoint of `step`, or of all steps if it is None, and its problems."""
    while True:
        manifest = found.get(step)
        try:
            with _progress([manifest]) as progress:
                return manifest, found.verify(manifest, progress=progress)
        except MissingCheckpointError:
            # The running training removed this checkpoint after it saved a newer one: verify that one.
            if step is not None or found.get() == manifest:
                raise


def _export(given: Namespace) -> int:
    folder = Path(given.dest).expanduser()
    with _failing():
        found = _open(given.uri)
        manifest = found.get(given.step)
        parts = manifest.parts if given.rank is None else manifest.parts_of(given.rank)
        try:
            if given.form == "dcp":
                items = _export_dcp(found, manifest, folder, given.rank)
            else:
                with ProgressLine(sum(part.size_bytes for part in parts)) as progress:
                    files = export(found.store, manifest, folder, given.rank, given.form, progress=progress)
                items = [_exported(path, part.kind, part.name, part.rank) for part, path in files]
        except ValueError as error:
            raise UsageError(str(error)) from error
        except OSError as error:
            raise Failure(Exit.CONFLICT, f"cannot write to {folder}: {error}") from error
    if given.output in ("json", "yaml"):
        body = {**_summary(manifest), "folder": str(folder), "files": items}
        emit_one(given, body, lambda: "")
    else:
        emit_list(given, items, _FILES, name=lambda item: str(item["file"]))
    return Exit.OK


def _export_dcp(found: Checkpoints, manifest: Manifest, folder: Path, rank: int | None) -> list[dict[str, Any]]:
    try:
        from mizzen.integrations import dcp_export
    except ImportError as error:
        raise UsageError(f"--dcp: needs torch, which cannot be imported here: {error}") from error
    made = prepared(folder)
    try:
        return [_exported(path, "dcp") for path in dcp_export.export(found, manifest, folder, rank)]
    except BaseException:
        for path in reversed(made):
            path.rmdir()
        raise


def _exported(path: Path, kind: str, part: str | None = None, rank: int | None = None) -> dict[str, Any]:
    return {"part": part, "rank": rank, "file": str(path), "size_bytes": path.stat().st_size, "kind": kind}


def _prune(given: Namespace) -> int:
    with _failing():
        log = Log(_root(given.uri))
        log.refresh()
        best = Best(given.best, given.best_count, given.greatest) if given.best else None
        retention = Retention(given.keep, given.keep_every, best)
        gone, total = [manifest for _, manifest in outdated(log, retention)], len(log.checkpoints)
        if gone and not given.dry_run:
            prune(log, retention)
    say(f"{'would remove' if given.dry_run else 'removed'} {len(gone)} of {total} checkpoints")
    items = [{**_summary(manifest), **_judgement(())} for manifest in gone]
    emit_list(given, items, _LS, name=lambda item: str(item["name"]))
    return Exit.OK


def _copy(given: Namespace) -> int:
    with _failing():
        found, target = _open(given.uri), _root(given.dest)
        known = found.list()
        wanted = known if given.step is None else [found.get(given.step)]
        there = Log(target)
        there.refresh()
        if foreign := [one.name for _, one in there.checkpoints if one not in known]:
            raise Failure(Exit.CONFLICT, f"{given.dest} has checkpoints of another training, such as {foreign[0]}")
        for manifest in reversed(wanted):
            copy_checkpoint(found.store, target, manifest)
    items = [{**_summary(manifest), **_judgement(())} for manifest in wanted]
    emit_list(given, items, _LS, name=lambda item: str(item["name"]))
    return Exit.OK


def _repair(given: Namespace) -> int:
    with _failing():
        found = repair(_root(given.uri), dry_run=given.dry_run)
    for name, reason in found.damaged:
        say(f"{name}: its record cannot be rebuilt: {reason}")
    if not found.rebuilt:
        say("no record was rebuilt")
    items = [{**_summary(manifest), **_judgement(())} for manifest in found.rebuilt]
    emit_list(given, items, _LS, name=lambda item: str(item["name"]))
    return Exit.DAMAGED if found.damaged else Exit.OK


def _say_records(found: Checkpoints) -> None:
    for record in found.damaged_records():
        say(f"{found.root}: {record.name} is damaged: {record.reason}")


def _progress(manifests: Sequence[Manifest]) -> ProgressLine:
    contents = {part.key: part.size_bytes for manifest in manifests for part in manifest.parts}
    return ProgressLine(sum(contents.values()))


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "save": manifest.id.save,
        "scores": dict(manifest.scores),
        "created_at": datetime.fromtimestamp(manifest.created_at_s, UTC).isoformat(),
        "size_bytes": manifest.size_bytes,
        "ranks": manifest.world_size,
    }


def _judgement(problems: Sequence[Problem]) -> dict[str, Any]:
    return {"whole": not problems, "problems": [asdict(problem) for problem in problems]}


def _part(found: Checkpoints, part: Part, others: Sequence[Manifest], problem: Problem | None) -> dict[str, Any]:
    wrong = problem.detail if problem else None
    tensors = None
    if part.kind == "tensors" and problem is None:
        try:
            tensors = [tensor._asdict() for tensor in found.tensors(part)]
        except CorruptCheckpointError as error:
            wrong = str(error)
    shared = [other.name for other in others if any(one.key == part.key for one in other.parts)]
    return {**asdict(part), "shared_with": shared, "tensors": tensors, "problem": wrong}


def _clock(item: Mapping[str, Any]) -> str:
    return amounts.instant(item["created_at"]).strftime("%Y-%m-%d %H:%M:%S")


def _wrong(problems: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{_whose(problem)}: {problem['what']}" for problem in problems)


def _whose(problem: Mapping[str, Any]) -> str:
    return str(problem["part"]) if problem["rank"] is None else f"{problem['part']} of rank {problem['rank']}"


def _verdict(item: Mapping[str, Any]) -> Iterator[str]:
    if item["whole"]:
        yield f"{item['name']} is intact ({amounts.size(item['size_bytes'])})"
        return
    yield f"{item['name']} is damaged:"
    for problem in item["problems"]:
        yield f"  {_whose(problem)}: {problem['detail']}"


def _page(body: Mapping[str, Any]) -> str:
    ago = amounts.between(body["created_at"], None)
    facts = {
        "root": body["root"],
        "step": body["step"],
        "attempt": f"{body['attempt']}, save {body['save']} of the root",
        "saved": f"{_clock(body)} UTC, {ago} ago",
        "size": amounts.size(body["size_bytes"]),
        "ranks": body["ranks"],
        **body["scores"],
        "intact": _wrong(body["problems"]) or "yes, by the sizes of its parts",
    }
    width = max(len(name) for name in facts)
    lines = [body["name"], *(f"{name.ljust(width)}  {cell(value)}" for name, value in facts.items()), "", "parts"]
    # Omit columns that are empty for all parts.
    shown = [column for column in _PARTS if column.header == "RANK" or any(column.text(one) for one in body["parts"])]
    lines += [f"  {line}" for line in table(body["parts"], shown, None)]
    for part in body["parts"]:
        if part["tensors"]:
            lines += ["", f"tensors of {cell(part['name'])}"]
            lines += [f"  {line}" for line in table(part["tensors"], _TENSORS, None)]
    return "\n".join(lines)


def checkpoint() -> Parser:
    """Return the parser of the group of commands."""
    parser = Parser(
        prog="mizzen checkpoint",
        description="List, check, export, copy, prune and repair checkpoints.\n\n"
        "All commands except prune and repair only read; a training may save to the same root meanwhile.",
    )
    add = parser.commands()
    ls = add("ls", "List the checkpoints of a root.")
    show = add("show", "Show one checkpoint with its parts and tensors.")
    verify = add("verify", "Read a checkpoint and compare it with its checksums.\n\nExit code 0: intact; 8: damaged.")
    write = add(
        "export",
        "Write the parts of a checkpoint as files.\n\n"
        "The files are named part-model.safetensors and so on. Each file is verified before it gets its name. If\n"
        "several ranks saved, the parts of single ranks are in folders rank-0000, rank-0001, ...",
    )
    mend = add(
        "repair",
        "Rebuild lost records of checkpoints from their parts.\n\n"
        "Reads the parts, and writes the record of each checkpoint whose parts are all intact. Prints them.\n"
        "A training that saves to the root meanwhile is stopped by its next save. Nothing is removed.\n\n"
        "Exit code 0: no checkpoint is lost; 8: the records of some cannot be rebuilt.",
    )
    mend.add_argument("--dry-run", action="store_true", help="Write nothing; only print what would be rebuilt.")
    trim = add(
        "prune",
        "Remove old checkpoints.\n\n"
        "Keeps the newest ones that are whole, and prints those that it removes. A training may save to the root\n"
        "meanwhile. Parts that other checkpoints need stay.",
    )
    trim.add_argument("--keep", type=whole(1), required=True, metavar="NUMBER", help="Keep this many of the newest.")
    trim.add_argument("--keep-every", type=whole(1), metavar="STEPS", help="Keep those at multiples of this step, too.")
    trim.add_argument(
        "--best", metavar="NAME", help="Keep those with the least NAME, as in Checkpointer(best=...), too."
    )
    trim.add_argument("--best-count", type=whole(1), default=1, metavar="NUMBER", help="How many of them. Default: 1.")
    trim.add_argument("--greatest", action="store_true", help="Keep those with the greatest NAME instead.")
    trim.add_argument("--dry-run", action="store_true", help="Remove nothing; only print what would be removed.")
    copy = add(
        "copy",
        "Copy checkpoints to another root.\n\n"
        "Each part is verified. A checkpoint exists in the other root when all of its parts are there. An interrupted\n"
        "copy can be repeated.",
    )
    uri = "Root of the checkpoints: a path, or a URI that starts with file://, s3:// or gs://."
    for one in (ls, show, verify, write, mend, trim, copy):
        one.add_argument("uri", metavar="URI", help=uri)
    write.add_argument("dest", metavar="DEST", help="The target folder. It must be empty or not exist.")
    copy.add_argument("dest", metavar="DEST", help="The other root: a path or a URI.")
    copy.add_argument("--step", type=whole(0), metavar="STEP", help="Copy only this step. Default: all checkpoints.")
    form = write.add_mutually_exclusive_group()
    form.add_argument(
        "--safetensors", dest="form", action="store_const", const="safetensors", default="parts",
        help="Write only parts with tensors, as NAME.safetensors.",
    )  # fmt: skip
    form.add_argument(
        "--hf", dest="form", action="store_const", const="hf", default="parts",
        help="Write what from_pretrained reads: the files of a Trainer, or the part model as model.safetensors.",
    )  # fmt: skip
    form.add_argument(
        "--dcp", dest="form", action="store_const", const="dcp",
        help="Write what torch.distributed.checkpoint reads. Needs torch, and memory for the whole state.",
    )  # fmt: skip
    newest = "Use the newest checkpoint of this step. Default: the newest checkpoint."
    for one in (show, verify, write):
        one.add_argument("--step", type=whole(0), metavar="STEP", help=newest)
    every = "Verify all checkpoints. A part that several checkpoints share is read once."
    verify.add_argument("--all", action="store_true", help=every)
    own = "Export only the parts that this rank loads: its own parts and the parts of all ranks."
    write.add_argument("--rank", type=whole(0), metavar="RANK", help=own)
    commands = {ls: _ls, show: _show, verify: _verify, write: _export, mend: _repair, trim: _prune, copy: _copy}
    for one, command in commands.items():
        one.runs(command)
    return parser
