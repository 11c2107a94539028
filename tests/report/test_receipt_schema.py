"""The schema of receipt.json: files that exist stay readable, and programs that read it find their fields.

tests/data/receipt_schema.json is the schema of version 1. A new optional field needs no new version. Write the file
again, so that the test guards the new field:

    python tests/report/test_receipt_schema.py
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from study.receipt.document import VERSION, ReceiptDocument

FILE = Path(__file__).resolve().parents[1] / "data" / "receipt_schema.json"
# Text for people, which no program reads.
_TEXTS = ("title", "description", "default")


def list_breaks(old: Any, new: Any, place: str = "receipt") -> Iterator[str]:
    """Yield the differences that break files of the old schema, or programs that read them."""
    if isinstance(old, dict):
        for key in sorted({*old, *new} - {*_TEXTS, "required"}):
            if key in ("properties", "$defs"):
                removed = sorted(set(old.get(key, {})) - set(new.get(key, {})))
                yield from (f"{place}.{name} is gone" for name in removed)
                for name in sorted(set(old.get(key, {})) & set(new.get(key, {}))):
                    yield from list_breaks(old[key][name], new[key][name], f"{place}.{name}")
            elif key in ("enum", "anyOf"):
                yield from (f"{place} is no longer {it}" for it in old.get(key, []) if it not in new.get(key, []))
            elif key in old and key in new:
                yield from list_breaks(old[key], new[key], f"{place}.{key}")
            else:
                yield f"{place} has another {key}"
        for name in sorted(set(new.get("required", [])) - set(old.get("required", []))):
            yield f"{place}.{name} is required, and files of this version lack it"
    elif old != new:
        yield f"{place} was {old!r} and is {new!r}"


def make_schema() -> dict[str, Any]:
    # As the file is written: fields without a value are null.
    schema: dict[str, Any] = json.loads(json.dumps(ReceiptDocument.model_json_schema(mode="validation")))
    return schema


def write_schema() -> None:
    FILE.write_text(json.dumps(make_schema(), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def test_no_field_of_this_version_of_the_schema_is_renamed_removed_or_newly_required() -> None:
    breaks = list(list_breaks(json.loads(FILE.read_text(encoding="utf-8")), make_schema()))
    advice = (
        f"receipts of version {VERSION} break: {breaks}. Keep the field, or raise VERSION and ReceiptDocument.version"
        " (study/receipt/document.py), and write tests/data/receipt_schema.json: python"
        " tests/report/test_receipt_schema.py"
    )
    assert not breaks, advice


def remove(schema: dict[str, Any]) -> None:
    del schema["$defs"]["PeakFacts"]["properties"]["moment"]


def rename(schema: dict[str, Any]) -> None:
    fields = schema["properties"]
    fields["memory_at_peak"] = fields.pop("memory")


def change_type(schema: dict[str, Any]) -> None:
    schema["$defs"]["ModelFacts"]["properties"]["parameters"]["type"] = "string"


def require(schema: dict[str, Any]) -> None:
    schema["properties"]["host"] = {"type": "string"}
    schema["required"].append("host")


def narrow(schema: dict[str, Any]) -> None:
    schema["$defs"]["EngineFacts"]["properties"]["engine"]["enum"].remove("fsdp1")


def no_longer_null(schema: dict[str, Any]) -> None:
    schema["$defs"]["TimeFacts"]["properties"]["step_s"] = {"type": "number"}


def remove_part(schema: dict[str, Any]) -> None:
    del schema["$defs"]["MemoryTimeline"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (remove, "receipt.PeakFacts.moment"),
        (rename, "receipt.memory"),
        (change_type, "receipt.ModelFacts.parameters.type"),
        (require, "receipt.host"),
        (narrow, "receipt.EngineFacts.engine"),
        (no_longer_null, "receipt.TimeFacts.step_s"),
        (remove_part, "receipt.MemoryTimeline"),
    ],
)
def test_a_change_that_breaks_files_or_readers_is_named(change: Callable[[dict[str, Any]], None], place: str) -> None:
    schema = make_schema()
    changed = copy.deepcopy(schema)
    change(changed)
    breaks = list(list_breaks(schema, changed))
    assert any(it.startswith(f"{place} ") for it in breaks), breaks


def test_a_new_optional_field_a_new_part_and_a_new_value_need_no_new_version() -> None:
    schema = make_schema()
    changed = copy.deepcopy(schema)
    changed["properties"]["remarks"] = {"type": "array", "items": {"$ref": "#/$defs/Change"}, "default": []}
    changed["$defs"]["Change"] = {"type": "object", "properties": {}, "required": ["says"]}
    changed["$defs"]["EngineFacts"]["properties"]["engine"]["enum"].append("megatron")
    changed["properties"]["made_at"]["description"] = "another text"
    changed["required"].remove("packages")
    assert list(list_breaks(schema, changed)) == []


if __name__ == "__main__":
    write_schema()
