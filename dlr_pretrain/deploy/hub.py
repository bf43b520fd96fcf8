"""Hands a folded model on: one commit to a repository of the Hugging Face hub."""

from pathlib import Path

from dlr_pretrain.config.key import ON_THE_HUB
from dlr_pretrain.util.errors import UserError, first_line


def require_writable(repo: str) -> None:
    """Raise UserError unless ``repo`` is a name, and the hub knows this machine's token and lets it write."""
    from huggingface_hub import HfApi

    if not ON_THE_HUB.fullmatch(repo):
        raise UserError(f"push to {repo!r}", "must be owner/name, a repository on the hub")
    try:
        token, rule = HfApi().whoami()["auth"]["accessToken"], "the token of this machine may only read"
        if token["role"] not in ("read", "fineGrained") or "repo.write" in str(token):
            return
    except Exception as error:  # the types differ between versions of the client
        rule = f"the hub accepts no token of this machine: {first_line(error)}"
    raise UserError(f"push to {repo}", rule, "Run hf auth login, or set HF_TOKEN, with a token that may write")


def push(folder: Path, report: Path, repo: str, public: bool = False) -> str:
    """Commit ``folder``, and ``report`` if it exists, to ``repo``, which is private if new, unless ``public``.

    Other weights there are deleted. Returns the commit's address, or raises UserError; the same call then goes on.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    files = {path.name: path for path in sorted((report, *folder.iterdir())) if path.is_file()}
    try:
        api = HfApi()
        api.create_repo(repo, private=not public, exist_ok=True)
        old = {name for name in api.list_repo_files(repo) if name.startswith("model") and ".safetensors" in name}
        changes: list = [CommitOperationAdd(name, path) for name, path in files.items()]
        changes += [CommitOperationDelete(name) for name in sorted(old - files.keys())]
        return api.create_commit(repo, changes, commit_message="Folded model of dlr_pretrain").commit_url
    except Exception as error:  # as above
        raise UserError(f"push to {repo}", f"failed: {first_line(error)}", "The same command pushes again") from error
