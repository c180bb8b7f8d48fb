import gzip
import io
import json
import tarfile

import numpy as np
import pytest

from twostroke.errors import ConfigError
from twostroke.twin.traces import read


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def mooncake(**changes):
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]} | changes
    return json.dumps(row)


def test_mooncake_blocks_are_equal_exactly_where_their_ids_are(tmp_path):
    path = write(
        tmp_path / "m.jsonl",
        mooncake(),
        mooncake(timestamp=1500, input_length=1100, hash_ids=[0, 2, 3]),
        mooncake(timestamp=2000, input_length=512, hash_ids=[4], output_length=0),
    )
    load = read(path)
    assert load.arrival_s.tolist() == [0.0, 1.5, 2.0]
    assert load.output_tokens.tolist() == [5, 5, 1]  # a prompt yields a token at least
    one, two, three = (load.prompt(i) for i in range(3))
    assert [len(p) for p in (one, two, three)] == [600, 1100, 512]
    assert one[:512].tolist() == two[:512].tolist()
    assert one[512] != two[512]
    assert not set(three.tolist()) & set(two.tolist())
    assert len({load.output_value(i) for i in range(3)} | {0, 1, 2, 3, 4}) == 8


def test_azure(tmp_path):
    path = write(
        tmp_path / "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.9799600,110,27",
    )
    load = read(path)
    assert load.arrival_s.tolist() == pytest.approx([0.0, 1.0])
    assert load.prompt_tokens.tolist() == [4808, 110]
    assert load.output_tokens.tolist() == [10, 27]
    assert len(read(path, num_requests=1)) == 1


HEADER = "session,idx,t_s,input_tokens,output_tokens,reusable_prefix_tokens"


def test_sessions_share_what_they_say_they_share(tmp_path):
    lines = [
        HEADER,
        "s1,0,0.0,100,10,0",
        "s1,1,5.0,150,10,110",
        "s2,0,0.0,70,5,0",
        "s1,2,9.0,90,5,64",
    ]
    path = tmp_path / "s.csv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    load = read(path)
    assert load.prompt_tokens.tolist() == [100, 70, 150, 90]
    assert load.after.tolist() == [-1, -1, 0, 2]
    whole = np.concatenate((load.prompt(0), [load.output_value(0)] * 10))
    assert load.prompt(2)[:110].tolist() == whole.tolist()
    assert load.prompt(3)[:64].tolist() == load.prompt(2)[:64].tolist()
    assert load.prompt(3)[64] != load.prompt(2)[64]
    spread = read(tmp_path / "s.csv.gz,rate=0.5/s")
    starts = spread.arrival_s[spread.after < 0]
    assert starts[1] - starts[0] > 0
    assert starts[1] == pytest.approx(4.0)


def test_our_own_ledger(tmp_path):
    rows = [
        {"arrival_s": 2.0, "prompt_tokens": 40, "output_tokens": 3, "intervals": {"queue": 0.5}},
        {"arrival_s": 1.0, "prompt_tokens": 40, "output_tokens": 3, "block_ids": [0, 1, 2]},
        {"arrival_s": 1.5, "prompt_tokens": 20, "output_tokens": 3, "block_ids": [0, 9]},
    ]
    load = read(write(tmp_path / "l.jsonl", *map(json.dumps, rows)))
    assert load.arrival_s.tolist() == [0.0, 0.5, 1.0]
    assert load.intervals["queue"].tolist() == [0.0, 0.0, 0.5]
    assert load.prompt(0)[:16].tolist() == load.prompt(1)[:16].tolist()
    assert not set(load.prompt(2)) & set(load.prompt(0))


def test_requests_of_a_vllm_run(tmp_path):
    row = {
        "request_id": "x",
        "input_toks": 7,
        "output_toks": 9,
        "arrival_time": 1e9,
        "queued_ts": 1,
    }
    load = read(write(tmp_path / "r.jsonl", json.dumps(row)))
    assert (load.arrival_s[0], load.prompt_tokens[0], load.output_tokens[0]) == (0.0, 7, 9)


def archive(path, **files):
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"data/{name.replace('__', '-').replace('_', '.')}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


DATA = json.dumps({"0": {"input_tokens": "{50: 0.5, 90: 0.5}", "output_tokens": "{7: 1.0}"}})


def test_servegen(tmp_path):
    path = archive(
        tmp_path / "g.tar.gz",
        chunk__0__trace_csv="0,2.0,1.0,Gamma,1.0,0.5\n600,0,0,,0,0\n",
        chunk__0__dataset_json=DATA,
        chunk__1__trace_csv="0,1.0,1.0,Weibull,1.0,1.0\n",
        chunk__1__dataset_json=DATA,
    )
    text = tmp_path / "g.tar.gz,duration=400"
    load = read(text, seed=1)
    assert len(load) == pytest.approx(1200, rel=0.1)
    assert set(load.prompt_tokens) == {50, 90}
    assert set(load.output_tokens) == {7}
    assert load.arrival_s.max() < 400
    assert read(text, seed=1).arrival_s.tobytes() == load.arrival_s.tobytes()
    scaled = read(tmp_path / "g.tar.gz,duration=400,rate=30/s", seed=1)
    assert len(scaled) == pytest.approx(12_000, rel=0.05)
    with pytest.raises(ConfigError, match="no client"):
        read(tmp_path / "g.tar.gz,start=5000")
    with pytest.raises(ConfigError, match="none of ServeGen"):
        read(archive(path, other_txt="x"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (mooncake(input_length=0), r"line 2: .*input_length"),
        (mooncake(hash_ids=[0]), r"line 2: 1 block ids for 600 tokens"),
        (mooncake(hash_ids=[0, -1]), r"line 2: .*hash_ids"),
        ('{"timestamp": 1}', r"line 2: .*input_length"),
        ("not json", "line 2"),
    ],
)
def test_mooncake_lines_that_are_wrong(tmp_path, line, words):
    with pytest.raises(ConfigError, match=words):
        read(write(tmp_path / "m.jsonl", mooncake(), line))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("s1,0,x,100,10,0", "line 2: t_s is 'x'"),
        ("s1,0,0.0,0,10,0", "line 2: input_tokens is 0"),
        ("s1,0,0.0,100,10,100", "line 2: reusable_prefix_tokens is 100 of 100"),
        ("s1,0,0.0,100,10,50", "line 2: reusable_prefix_tokens is 50; no context"),
        ("s1,0,0.0,100", "line 2: reusable_prefix_tokens is missing"),
    ],
)
def test_lines_of_sessions_that_are_wrong(tmp_path, line, words):
    with pytest.raises(ConfigError, match=words):
        read(write(tmp_path / "s.csv", HEADER, line))


def test_files_that_are_wrong(tmp_path):
    with pytest.raises(ConfigError, match="is no file, and no spec"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="no known format"):
        read(write(tmp_path / "x.csv", "a,b", "1,2"))
    with pytest.raises(ConfigError, match="TIMESTAMP is 'soon'"):
        read(write(tmp_path / "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "soon,1,1"))
    with pytest.raises(ConfigError, match="options: rate"):
        read(tmp_path / "x.csv,colour=1")
    with pytest.raises(ConfigError, match="rate is '0'"):
        read(tmp_path / "x.csv,rate=0")
    (tmp_path / "y.jsonl").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "y.jsonl")
