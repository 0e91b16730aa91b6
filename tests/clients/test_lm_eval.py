"""lm-evaluation-harness scores a small task through /v1/completions, and gets what transformers gets.

It lives in a virtual environment of its own, made the first time and kept, which sees this one's packages.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.server.real import save_chat_model, serve_real

VERSION = "0.4.13"
ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    "sea",
    "wind",
    "sail",
    "rope",
    "deck",
    "gull",
    "tide",
    "salt",
    "mast",
    "fog",
    "bell",
    "oar",
    "reef",
    "star",
    "map",
]

TASK = """
task: sailing
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: question
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
"""


def lm_eval_python() -> Path:
    """The interpreter of an environment with lm-eval in it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pagekv-tests" / f"lm-eval-{VERSION}"
    python = folder / "bin" / "python"
    probe = [str(python), "-c", f"import lm_eval; assert lm_eval.__version__ == {VERSION!r}"]
    if python.exists() and subprocess.run(probe, capture_output=True).returncode == 0:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        str(ROOT / "constraints.txt"),
        f"lm-eval[api]=={VERSION}",
    ]
    made = subprocess.run(install, capture_output=True, text=True, timeout=1200)
    if made.returncode:
        pytest.skip(f"lm-eval cannot be installed: {made.stderr[-500:]}")
    return python


def make_task(folder: Path) -> list[dict[str, Any]]:
    draw = random.Random(3)
    documents = [
        {
            "question": f"The {draw.choice(WORDS)} and the {draw.choice(WORDS)} are",
            "choices": draw.sample(WORDS, 4),
            "label": draw.randrange(4),
        }
        for _ in range(8)
    ]
    data = folder / "test.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents), encoding="utf-8")
    (folder / "sailing.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    return documents


def dense_scores(model: Any, tokenizer: Any, document: dict[str, Any]) -> list[float]:
    """The log-probability of each choice after the question, as transformers computes it."""
    scores = []
    for choice in document["choices"]:
        context = tokenizer.encode(document["question"])
        whole = tokenizer.encode(f"{document['question']} {choice}")
        with torch.inference_mode():
            logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        places = range(len(context), len(whole))
        scores.append(sum(logprobs[place - 1, whole[place]].item() for place in places))
    return scores


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_small_task(tmp_path: Path) -> None:
    python = lm_eval_python()
    checkpoint = tmp_path / "model"
    model: Any = save_chat_model(checkpoint)
    documents = make_task(tmp_path)
    out = tmp_path / "out"
    with serve_real(checkpoint) as server:
        arguments = (
            f"model=tiny,base_url={server.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={checkpoint}"
        )
        command = [str(python), "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments]
        command += ["--tasks", "sailing", "--include_path", str(tmp_path), "--output_path", str(out), "--log_samples"]
        offline = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = out.rglob("samples_sailing_*.jsonl")
    found = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert len(found) == len(documents)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    right = 0
    for sample in found:
        expected = dense_scores(model.eval(), tokenizer, sample["doc"])
        got = [float(response[0][0]) for response in sample["resps"]]
        assert got == pytest.approx(expected, abs=1e-4)
        right += expected.index(max(expected)) == sample["doc"]["label"]
    (results,) = out.rglob("results_*.json")
    accuracy = json.loads(results.read_text(encoding="utf-8"))["results"]["sailing"]["acc,none"]
    assert accuracy == pytest.approx(right / len(documents))
