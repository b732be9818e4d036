"""Renders the results of `infer.bench --split` in Markdown."""

from __future__ import annotations

from typing import Any

from infer.bench.tables import cut_line, precision, short, table_of

COLUMNS = {  # column head -> key of a mode's row
    "tokens/s": "tokens_per_s",
    "over API": "speedup_over_stream",
    "over round trips": "speedup_over_plain",
    "first token ms": "first_token_ms",
    "tau": "tau",
    "target passes": "target_passes",
    "bytes a token up": "bytes_up_per_token",
    "down": "bytes_down_per_token",
    "reply ms": "reply_ms",
    "drafting s": "drafting_s",
    "waiting s": "waiting_s",
}


def render(document: dict[str, Any]) -> str:
    """The table of networks and the settings."""
    settings, machine = document["settings"], document["machine"]
    profiles, count = document["profiles"], len(document["differences"])
    parts = [
        f"{settings['prompts']} prompts of the suite {settings['suite']}, answers of "
        f"{settings['max_new_tokens']} tokens, {precision(settings)}, rows in {settings['codec']}; "
        f"drafting slowed down {settings['client_slowdown']:g} times; {machine['device_kind']}, "
        f"{machine['cores']} cores for client and server together; medians (quartiles) and means. "
        f"Local plain decoding: {short(document['local_plain_tokens_per_s'])} tokens/s.",
        table_of([_mode(profile, row) for profile in profiles for row in profile["modes"]]),
        f"{count} answers DIFFER from local plain decoding." if count else "",
        cut_line(document, "networks"),
    ]
    return "\n\n".join(part for part in parts if part)


def _mode(profile: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    cells = {head: short(row[key]) for head, key in COLUMNS.items()}
    if row["tokens_per_s_quartiles"]:
        cells["tokens/s"] += f" ({' to '.join(map(short, row['tokens_per_s_quartiles']))})"
    network = f"{profile['profile']}: {profile['delay_ms']:g} +- {profile['jitter_ms']:g} ms, "
    network += f"{100 * profile['loss']:g} % loss, {profile['rate_mbit'] or 'any'} Mbit/s"
    same = f"{row['same_as_plain']}/{row['answers']}"
    return {"network, one way": network, "mode": row["mode"], **cells, "same text": same}
