"""The key that clients of an HTTP endpoint send. It lies in the environment or in a file, never in a topology."""

import os

from seed_async.topology_roles import Http


class ApiKeyError(ValueError):
    """A key that a topology refers to and that is not there."""


def read_api_key(http: Http) -> str | None:
    """The key, or None where none is asked for. Raises ApiKeyError for one that is missing or empty."""
    if http.api_key_env is not None:
        key, where = os.environ.get(http.api_key_env, ""), f"environment variable {http.api_key_env}"
    elif http.api_key_file is not None:
        where = str(http.api_key_file)
        try:
            key = http.api_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ApiKeyError(f"roles.policy.http: {where} cannot be read as an API key: {error}") from error
    else:
        return None
    if not key.isascii() or not key.isprintable() or not key.strip():
        raise ApiKeyError(f"roles.policy.http: {where} holds no API key")
    return key
