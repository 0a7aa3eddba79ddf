"""What an engine says while it reads its weights."""

from dspark.engine import loading
from dspark.engine.assembly import assemble


def test_it_says_how_far_it_is_from_time_to_time(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(loading.time, "monotonic", lambda: now[0])
    news = loading.LoadingNews(said.append)
    for second in range(25):
        now[0] = float(second)
        news(second * 10**9, 50 * 10**9)
    assert said == ["10.00 of 50.00 GB of weights are read", "20.00 of 50.00 GB of weights are read"]


def test_an_engine_says_it_in_its_log(monkeypatch, caplog):
    monkeypatch.setattr(loading.LoadingNews.__init__, "__defaults__", (0.0,))
    with caplog.at_level("INFO", "dspark.engine"):
        assemble()
    assert any("GB of weights are read" in message for message in caplog.messages)
