"""`mizzen tetris generate`: generates an instance of a given size, as a JSON document or a folder of Parquet files."""

from pathlib import Path

from infra.errors import ConfigurationError
from server.outputs import STANDARD, check_outputs, write_json
from server.progress import starting


def run_generate(tables: int, regions: int, seed: int, out: Path) -> int:
    """Runs `mizzen tetris generate`; returns the exit code.

    If `out` ends in `.json` or is `-`, a JSON document is written, otherwise a folder.

    Raises:
        ConfigurationError: `out` cannot be written.
    """
    is_document = out == STANDARD or out.suffix == ".json"
    with starting():
        if is_document:
            check_outputs({"--out": out}, {})
        elif out.exists() and not out.is_dir():
            raise ConfigurationError(f"--out: {out}: is a file: give a folder, or a name that ends in .json")
        elif not out.resolve().parent.is_dir():
            raise ConfigurationError(f"--out: {out}: folder {out.resolve().parent} does not exist")
        from tetris.documents import instance_document
        from tetris.folders import write_folder
        from tetris.generate import generate

        columns = generate(tables, regions, seed)
    if is_document:
        write_json(out, instance_document(columns.to_instance()))
        return 0
    try:
        write_folder(columns, out)
    except OSError as error:
        raise ConfigurationError(f"--out: {out}: {error.strerror}") from None
    return 0
