import json

import pytest

from twostroke.bench import serving
from twostroke.bench.options import ServeOptions
from twostroke.errors import ConfigError, TwostrokeError

SMALL = {"num_prompts": 6, "random_input_len": 4, "random_output_len": 3}


async def test_a_whole_run(server):
    done = []
    options = ServeOptions(base_url=server.url, **SMALL, seed=5, num_warmups=2)
    result = await serving.measure(options, done.append)
    assert (result["completed"], result["failed"], len(done)) == (6, 0, 6)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (24, 18)
    assert result["model_id"] == "fake"
    assert result["request_rate"] == "inf"
    warm_up, measured = server.bodies[:2], server.bodies[2:]
    assert len(measured) == 6
    assert all(20 <= token < 64 for body in measured for token in body["prompt"])
    # What warms up must leave no prefix behind that the run could hit.
    assert not any(body["prompt"] in [one["prompt"] for one in measured] for body in warm_up)


async def test_a_refused_warm_up_ends_it(server):
    server.error = (400, "too long")
    with pytest.raises(TwostrokeError, match="HTTP 400: too long"):
        await serving.measure(ServeOptions(base_url=server.url, **SMALL))


async def test_wrong_options_are_found_before_anything_is_sent(server):
    with pytest.raises(ConfigError, match="goodput"):
        await serving.measure(ServeOptions(base_url=server.url, goodput=["x:1"]))
    assert server.bodies == []


def test_datasets(tmp_path):
    (tmp_path / "p").write_text('{"prompt": "hello"}')
    custom = ServeOptions(dataset_name="custom", dataset_path=tmp_path / "p")
    assert [prompt.prompt for prompt in serving.make_prompts(custom, 64)] == ["hello"]
    with pytest.raises(ConfigError, match="--dataset-path"):
        serving.make_prompts(ServeOptions(dataset_name="custom"), 64)
    with pytest.raises(ConfigError, match="'sharegpt'; choices: random, custom"):
        serving.make_prompts(ServeOptions(dataset_name="sharegpt"), 64)


def test_a_saved_result_is_named_after_rate_and_model(tmp_path):
    options = ServeOptions(result_dir=tmp_path / "new", request_rate=2.0, max_concurrency=8)
    path = serving.save({"model_id": "org/fake", "date": "20260101-000000"}, options)
    assert path.name == "openai-2.0qps-concurrency8-fake-20260101-000000.json"
    assert json.loads(path.read_text())["model_id"] == "org/fake"
    blocked = ServeOptions(result_dir=path)
    with pytest.raises(ConfigError, match="cannot write the result"):
        serving.save({"model_id": "m", "date": "d"}, blocked)
