"""Put a run's folder on a hub, with huggingface_hub."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

from agent_r1.errors import ConfigError, DataError
from agent_r1.guard import describe
from agent_r1.runs.run_dir import RunDir
from agent_r1.share.folder import Report, export_run


def push_run(
    run: RunDir, hub_id: str, *, report: Report, merge: bool = False, gguf: str | None = None, public: bool = False
) -> str:
    """Export to a temporary folder and upload it; return the address. A new repository is private unless `public`."""
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = export_run(run, Path(temporary) / "model", report=report, merge=merge, gguf=gguf, place=hub_id)
        try:
            created = api.create_repo(hub_id, private=not public, exist_ok=True)
            report(f"uploading to {created}")
            api.upload_folder(repo_id=hub_id, folder_path=folder, commit_message=f"Add {run.path.name}")
        except HFValidationError as error:
            raise ConfigError(f"{hub_id!r} is not a hub id, such as me/my-agent: {error}") from error
        except Exception as error:  # huggingface_hub passes on errors of its HTTP library
            status = getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(error, LocalTokenNotFoundError) or status in (401, 403):
                raise ConfigError(
                    f"the hub does not let you write to {hub_id}: run `hf auth login`, or set HF_TOKEN to a token that "
                    "may write"
                ) from error
            raise DataError(f"cannot push to {hub_id}: {describe(error)}") from error
    return str(created)
