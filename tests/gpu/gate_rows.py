# SPDX-License-Identifier: Apache-2.0
"""Which schedule rows the gate's calls take, and small cases that take the others."""

from dataclasses import dataclass
from typing import Any

from csa_runtime import _native
from gpu import names
from gpu.gate_cases import Case, forced

Row = dict[str, Any]
# Bytes off a 256-byte boundary: of 16-bit tensors, and of ape.
OFFSETS = tuple((tensors, ape) for tensors in (0, 8, 4, 2) for ape in (0, 8, 4))
SMALLER_LIMITS = (163 << 10, 99 << 10)  # shared memory of a block on smaller devices
MOST_ELEMENTS = 1 << 28  # of kv


def _within(count: int, limit: int, times: int = 1) -> bool:
    return limit < 0 or count <= limit * times


@dataclass(frozen=True)
class Table:
    """The schedule rows of the device's architecture, in the manifest's order."""

    rows: tuple[Row, ...]
    capability: int
    limit: int

    def family(self, operation: str, ratio: int, coff: int) -> list[int]:
        """Indices of a family's rows."""
        key = (operation, ratio, coff)
        return [
            i for i, r in enumerate(self.rows) if (r["operation"], r["ratio"], r["coff"]) == key
        ]

    def taken(self, explained: dict[str, Any], case: Case, rows: int) -> list[int]:
        """The rows that a call took: of its own family, and of what finishes a backward."""
        found = []
        for launch in explained["launches"]:
            variant = launch["variant"]
            row = next(row for row in self.rows if row["variant"] == variant)
            whole = row["operation"] in ("forward", "backward")
            size = rows * case.head_dim if whole else case.ratio * case.coff * case.head_dim
            # Rows are tried in order, so of those with this variant it is the first that fits.
            found += [
                i
                for i in self.family(row["operation"], row["ratio"], row["coff"])
                if self.rows[i]["variant"] == variant
                and _within(size, self.rows[i]["max_elements"])
                and _within(rows, self.rows[i]["max_rows_per_segment"], len(case.lengths))
            ][:1]
        return found

    def describe(self, index: int) -> str:
        """A row in words."""
        row = self.rows[index]
        size = "any size" if row["max_elements"] < 0 else f"up to {row['max_elements']:,} elements"
        each = row["max_rows_per_segment"]
        return f"{row['variant']}, {size}" + (f", up to {each} rows a segment" if each >= 0 else "")

    def reach(self, index: int, limit: int | None = None) -> Case | None:
        """The smallest call found that takes a row, on a device with `limit` bytes of shared."""
        row = self.rows[index]
        ratio, coff = row["ratio"], row["coff"]
        if row["operation"] == "finish":
            return None
        family = self.family(row["operation"], ratio, coff)
        limits = sorted({self.rows[i]["max_elements"] for i in family} - {-1})
        for head_dim in (128, 512, 64, 8):
            counts = sorted({1, *(n // head_dim + more for n in limits for more in (0, 1))} - {0})
            for count in counts:
                # Where a row asks for short segments, as many as hold `count` rows or a few more.
                each = min(row["max_rows_per_segment"], count)
                lengths = (count * ratio,) if each < 0 else (each * ratio,) * -(-count // each)
                rows = sum(lengths) // ratio
                if rows * ratio * coff * head_dim > MOST_ELEMENTS:
                    continue
                for offset, ape_offset in OFFSETS:
                    case = Case(
                        "reach", ratio, coff, head_dim, lengths,
                        offset=offset, ape_offset=ape_offset,
                    )  # fmt: skip
                    if index in self.taken(self.ask(row["operation"], case, limit), case, rows):
                        return case
        return None

    def ask(self, operation: str, case: Case, limit: int | None) -> dict[str, Any]:
        """`explain` of a case without tails, with addresses that nothing reads."""
        width, d, tokens = case.coff * case.head_dim, case.head_dim, case.tokens
        fields = ["kv", "score", "cu_seqlens", "cu_seqlens_comp", "ape"]
        fields += ["out"] if operation == "forward" else ["grad_out", "grad_kv", "grad_score"]
        places = {name: number << 46 for number, name in enumerate(fields, start=1)}
        for name in ("kv", "score", "grad_out"):
            if name in places:
                places[name] += case.offset
        places["ape"] += case.ape_offset
        strides = {"kv_stride": width, "score_stride": width}
        if operation == "forward":
            strides["out_stride"] = d
        else:
            strides |= {"grad_out_stride": d, "grad_kv_stride": width, "grad_score_stride": width}
        found: dict[str, Any] = _native.explain(
            operation, ratio=case.ratio, coff=case.coff, dtype=1, tokens=tokens,
            segments=len(case.lengths), rows=tokens // case.ratio, head_dim=d,
            compute_capability=self.capability, shared_limit=self.limit if limit is None else limit,
            **places, **strides,
        )  # fmt: skip
        return found

    def by_name(self, index: int, at: Case) -> tuple[Case | None, str]:
        """For a row that no call here takes: a case that forces its variant, and why it is needed.

        Without a case, the row is taken nowhere.
        """
        variant = self.rows[index]["variant"]
        for limit in SMALLER_LIMITS:
            if limit < self.limit and self.reach(index, limit) is not None:
                why = f"a device with {limit >> 10} KB of shared memory a block takes it"
                return forced(at, self.rows[index]["operation"], variant), why
        return None, "no call takes it, here or with less shared memory"


def table(manifest: dict[str, Any]) -> Table:
    """The rows of device 0's architecture."""
    arch, capability, limit = names.device()
    rows = tuple(row for row in manifest["schedules"] if row["arch"] == arch)
    return Table(rows, capability, limit)
