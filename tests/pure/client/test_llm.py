import asyncio
import gc
import threading

import pytest

from tests.pure.client.channel import EchoChannel, ScriptedChannel
from twostroke.client.llm import LLM
from twostroke.errors import ConfigError, EngineDeadError, ModelError, RequestError
from twostroke.messages import EngineDead, SamplingParams
from twostroke.testing.tiny_model import write_tiny_checkpoint


class Engine:
    """A handle whose channels answer with the prompt, unless others are given."""

    def __init__(self, *channels) -> None:
        self.channels = channels or (EchoChannel(),)
        self.channel = self.channels[0]
        self.stopped = 0
        self.code = 0

    def stop(self) -> int:
        self.stopped += 1
        return self.code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def llm(checkpoint, engine):
    with LLM(checkpoint, launch=lambda config, at: engine, max_num_seqs=2) as llm:
        yield llm
    assert engine.stopped == 1


def test_prompts_of_every_kind(llm):
    params = SamplingParams(max_tokens=2)
    for prompt in ("ab", [97, 98], {"prompt": "ab"}, {"prompt_token_ids": [97, 98]}, ["ab"]):
        (result,) = llm.generate(prompt, params, use_tqdm=False)
        assert result.prompt_token_ids == [97, 98]
        assert [o.text for o in result.outputs] == ["ab"]
        assert result.outputs[0].finish_reason == "length"
    assert result.prompt == "ab"
    assert sum(result.metrics.intervals_s.values()) == pytest.approx(result.metrics.latency_s)
    assert llm.generate([], params) == []


def test_several_engines_share_the_prompts(checkpoint):
    engine = Engine(EchoChannel(), EchoChannel())
    settings = {"data_parallel_size": 2, "max_num_seqs": 1}
    with LLM(checkpoint, launch=lambda config, at: engine, **settings) as llm:
        prompts = [f"{i:03}" for i in range(10)]
        results = llm.generate(prompts, SamplingParams(max_tokens=3), use_tqdm=False)
    assert [r.outputs[0].text for r in results] == prompts
    assert [len(channel.added) for channel in engine.channels] == [5, 5]


def test_many_prompts_keep_their_order_and_parameters(llm, capsys):
    prompts = [f"{i:03}" for i in range(40)]
    each = [SamplingParams(max_tokens=1 + i % 3, n=1 + i % 2) for i in range(40)]
    results = llm.generate(prompts, each)
    assert [r.prompt for r in results] == prompts
    for prompt, params, result in zip(prompts, each, results, strict=True):
        assert [o.text for o in result.outputs] == [prompt[: params.max_tokens]] * params.n
    assert "40/40" in capsys.readouterr().out


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    one, two = llm.chat([messages, messages], SamplingParams(max_tokens=1), use_tqdm=False)
    assert one.prompt == two.prompt
    assert "hi" in one.prompt
    assert llm.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False) == one.prompt


def test_a_refused_prompt_is_named_and_ends_the_others(llm, engine):
    with pytest.raises(RequestError) as caught:
        llm.generate([[97], [10**6], [98]], SamplingParams(), use_tqdm=False)
    assert caught.value.__notes__ == ["in prompt 1"]
    with pytest.raises(RequestError, match="2 prompts came with 1"):
        llm.generate(["a", "b"], [SamplingParams()])
    for wrong in ([{"text": "a"}], None, 5, b"a", [None], ["a", 1], [1, "a"], [[1.5]]):
        with pytest.raises(RequestError, match="a prompt is"):
            llm.generate(wrong)
    assert llm.generate("ab", use_tqdm=False)[0].outputs[0].text.startswith("abab")


def test_parameters_of_a_wrong_type_are_refused_by_name(llm):
    for name, value in {
        "top_k": 1.5,
        "temperature": None,
        "stop_token_ids": ("a",),
        "logit_bias": {"x": 1.0},
        "seed": 1 << 70,
    }.items():
        with pytest.raises(RequestError, match=r"sampling_params|seed"):
            llm.generate("a", SamplingParams(**{name: value}), use_tqdm=False)
    (result,) = llm.generate("abcd", SamplingParams(max_tokens=4, stop="cd"), use_tqdm=False)
    assert (result.outputs[0].text, result.outputs[0].stop_reason) == ("ab", "cd")


@pytest.mark.parametrize(
    ("code", "kind"), [(2, ConfigError), (3, ModelError), (1, EngineDeadError)]
)
def test_an_engine_that_cannot_start_raises_what_was_wrong(checkpoint, code, kind):
    engine = Engine(ScriptedChannel(ready=None))
    engine.channel.say(EngineDead("--max-model-len is 9"))
    engine.code = code
    with pytest.raises(kind, match="--max-model-len is 9"):
        LLM(checkpoint, launch=lambda config, at: engine)
    assert engine.stopped


def test_it_works_from_threads_and_inside_a_running_loop(llm):
    texts = {}

    def work(name: str) -> None:
        texts[name] = (
            llm.generate(name, SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].text
        )

    async def inside() -> None:
        work("z")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    asyncio.run(inside())
    for thread in threads:
        thread.join()
    assert texts == {name: name for name in "abcz"}


def test_an_interrupt_aborts_in_the_core(checkpoint, monkeypatch):
    engine = Engine(ScriptedChannel())  # never answers
    with LLM(checkpoint, launch=lambda config, at: engine) as llm:
        real = asyncio.run_coroutine_threadsafe

        def interrupted(coroutine, loop):
            future = real(coroutine, loop)

            def result() -> None:
                while not engine.channel.added:
                    pass
                raise KeyboardInterrupt

            future.result = result
            return future

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate("ab", use_tqdm=False)
        llm._run(asyncio.sleep(0.01))
        assert engine.channel.aborted == [engine.channel.added[0].handle]


def test_closing_is_final_and_idempotent(checkpoint):
    engine = Engine()
    llm = LLM(checkpoint, launch=lambda config, at: engine)
    llm.close()
    llm.close()
    assert engine.stopped == 1
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a")


def test_a_forgotten_one_stops_its_engine(checkpoint):
    engine = Engine()
    LLM(checkpoint, launch=lambda config, at: engine)
    gc.collect()
    assert engine.stopped == 1


def test_settings_are_checked_before_anything_starts(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(checkpoint, max_num_seq=1)
    with pytest.raises(ModelError, match="chat template"):
        LLM(checkpoint, chat_template=str(tmp_path / "none.jinja"))
