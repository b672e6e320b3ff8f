import csv

import pytest

from meshwright.catalog.entries import DATA
from meshwright.catalog.lookup import all_claims, claim
from meshwright.errors import UnknownNameError


def test_claims_name_their_document_by_title():
    documents = {c.document for c in all_claims()}
    assert len(documents) == 5
    assert all(len(title) > 20 for title in documents)


def test_strong_scaling_table_is_complete():
    table = {c.num_accelerators: c.value for c in all_claims() if c.metric == "scaling_efficiency"}
    assert table == {768: 1.0, 1024: 1.0, 2048: 1.0, 16_384: 1.0, 32_768: 1.0, 65_536: 0.9}


def test_one_claim_is_found_by_its_id():
    assert (claim("scale_07").value, claim("scale_07").unit) == (384, "GPUs")
    with pytest.raises(UnknownNameError, match="scale_0"):
        claim("scale_99")


def test_ids_are_unique():
    assert len({c.claim_id for c in all_claims()}) == len(all_claims())


def test_measured_collectives_are_shipped():
    with (DATA / "collectives_measured.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 100
    assert all(float(row["busbw_gb_s"]) > 0 and int(row["gpus"]) > 1 for row in rows)
