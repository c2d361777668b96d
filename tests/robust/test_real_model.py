"""The real model under `kill -9`: all ranks at once and start again; one rank, which comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from census import no_growth
from llama_programs import generate
from ranks import start_processes
from signs import Signs

from graphshard.comm.launch import free_port
from graphshard.models.smollm2 import prepare_smollm2


@pytest.mark.slow
def test_the_real_model_survives_kills_and_restarts(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model, port = str(prepare_smollm2(progress=False)), free_port()
    with no_growth():
        for attempt in range(5):
            folder = tmp_path / str(attempt)
            with (
                Signs(folder) as signs,
                start_processes(generate, 4, str(folder), model, run_id="one", master_port=port) as ranks,
            ):
                signs.wait_for("ready", range(4), limit_s=180.0)
                if attempt < 4:
                    for rank in range(4):
                        ranks.signal(rank)
                    assert [result.error for result in ranks.wait(60.0)] == ["was killed by SIGKILL"] * 4
                    continue
                ranks.signal(3)
                assert ranks.restart(3).error == "was killed by SIGKILL"
                assert signs.wait_for("ready", [3], limit_s=180.0) == {3: ranks.pids[3]}
                signs.order("stop")
                results = ranks.wait(900.0)
    for rank, result in enumerate(results):
        assert result.is_good, result.traceback
        told = result.value
        assert len(told["hashes"]) == 1, "every continuation is equal bit for bit"
        assert (told["hashes"], told["tokens"]) == (
            results[rank % 2].value["hashes"],
            results[rank % 2].value["tokens"],
        )
    assert results[0].value["tokens"] != results[1].value["tokens"] and results[0].value["pinned"] == {}
