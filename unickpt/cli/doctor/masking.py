"""Text that can be shown to others: without passwords, keys, and addresses that hold a secret."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASS(?!IVE)|CREDENTIAL|AUTH(?!OR)|COOKIE|WEBHOOK|SAS\b", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/\s@]+@")
# what follows the host of a web address may be a secret: an agent's address and a webhook hold theirs there
_WEB_PATH = re.compile(r"(https?://[^/\s?#,;'\"]+)[/?#][^\s,;'\"]*", re.IGNORECASE)
_QUERY = re.compile(r"(://[^\s?]*)\?[^\s]*")
_ASSIGNED = re.compile(r"(?i)\b(\w*(?:password|passwd|secret|token|api_?key|access_?key|credential)\w*\s*[=:]\s*)[^\s,;&]+")
_TOKENS = re.compile(r"\b(?:hf_|gh[opsur]_|github_pat_|glpat-|sk-|xox[abpr]-|AKIA|ASIA|AIza|ya29\.|eyJ)[\w.-]{10,}")


def variable(name: str, value: str) -> str:
    """Return the value of a variable of the environment as it may be shown."""
    return HIDDEN if value and _NAMES.search(name) else without_secrets(value)


def without_secrets(text: str) -> str:
    """Hide users and passwords, paths and queries of web addresses, values of what is named like a secret, and tokens."""
    text = _USER.sub(f"{HIDDEN}@", text)
    text = _WEB_PATH.sub(rf"\1/{HIDDEN}", text)
    text = _QUERY.sub(rf"\1?{HIDDEN}", text)
    return _TOKENS.sub(HIDDEN, _ASSIGNED.sub(rf"\1{HIDDEN}", text))


def document_without_secrets(value: Any) -> Any:
    """Return a JSON document without secrets in its texts."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {key: document_without_secrets(item) for key, item in value.items()}
    return [document_without_secrets(item) for item in value] if isinstance(value, (list, tuple)) else value
