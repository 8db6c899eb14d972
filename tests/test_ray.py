"""Runs on a Ray cluster: the rows that one process makes, also where an actor is killed in the middle."""

import subprocess
import sys

import pytest

import attnflow
from classifiers import small_bert, tokenizer
from rows import same_rows

pytest.importorskip("ray", reason="ray is not installed: pip install 'attnflow[ray]'")

# Two machines of one core each. The fourth pass of one of the two actors kills its process.
SCRIPT = """
import os, signal, sys
from functools import partial
import ray
from ray.cluster_utils import Cluster
import attnflow

def loaded(folder, mark):
    model, tokenizer = attnflow.load_model(folder, task="text-classification")
    passes = []

    def kill(module, inputs):
        passes.append(module)
        if len(passes) == 4 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    if ray.get_runtime_context().get_actor_id():
        model.register_forward_pre_hook(kill)
    return model, tokenizer

model, file, folder, mark = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
attnflow.run(partial(loaded, model, mark), file, folder, workers=2, engine="ray", shard_size=2)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.long
def test_an_actor_that_is_killed_loses_nothing(tmp_path):
    for part in (small_bert(), tokenizer()):
        part.save_pretrained(tmp_path / "model")
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"the film number {number} is {'very ' * number}good\n" for number in range(12)))
    expected = attnflow.run(tmp_path / "model", texts, tmp_path / "one", shard_size=2)
    begun = attnflow.run(tmp_path / "model", texts, tmp_path / "two", shard_size=2, limit=4)
    before = {path: path.stat().st_mtime_ns for path in begun.shards}
    mark = tmp_path / "killed"
    arguments = [tmp_path / "model", texts, tmp_path / "two", mark]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert mark.exists()
    found = attnflow.read(tmp_path / "two")
    assert {path: path.stat().st_mtime_ns for path in found.shards if path in before} == before
    assert [path.name for path in found.shards] == [path.name for path in expected.shards]
    assert found.manifest["recipe"] == expected.manifest["recipe"]
    same_rows(found.table, expected.table)


def test_what_ray_cannot_do_is_said(tmp_path):
    model = small_bert(), tokenizer()
    with pytest.raises(ValueError, match="1 workers need a model that each can load"):
        attnflow.run(model, ["a film"], tmp_path / "run", engine="ray")
    with pytest.raises(ValueError, match="engine='spark' is unknown; give one of local, ray"):
        attnflow.run(model, ["a film"], tmp_path / "run", engine="spark")
