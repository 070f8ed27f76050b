"""Four walks through the library are traced, and may not grow: stations, calls of our functions, files."""

import pytest

import walks


@pytest.mark.parametrize("title", walks.WALKS)
def test_a_walk_is_no_longer_than_its_limits(title):
    walk, most = walks.WALKS[title]
    found = walk()
    assert len(found.stations) <= most.stations, found.stations
    assert found.calls <= most.calls
    assert len(found.files) <= most.files, found.files


def test_a_station_is_a_room_that_is_entered_from_the_core():
    core, engine, other, method = (
        walks.ROOT + name for name in ("step.py", "noise/streams.py", "draws/source.py", "methods/dp_sgd.py")
    )
    assert walks.is_station(engine, core)
    assert walks.is_station(engine, None)
    assert walks.is_station(engine, method)
    assert walks.is_station(core, engine)
    assert not walks.is_station(other, engine), "an engine behind another one's protocol"
    assert not walks.is_station(walks.ROOT + "queries.py", core)
    assert not walks.is_station(walks.ROOT + "support/checks.py", core)


def test_an_engine_that_the_core_enters_for_nothing_is_seen(monkeypatch):
    """What the walk is to hold: a call from the core into another room makes the walk longer."""
    from fodp import layout
    from fodp.accounting import Event
    from fodp.session import Session

    walk, most = walks.WALKS["a batch, Trainer"]
    namespace = {"step": Session.take_step, "Event": Event}
    code = compile("def longer(session):\n    Event(0.5, 1.0)\n    return step(session)", layout.__file__, "exec")
    exec(code, namespace)
    monkeypatch.setattr(Session, "take_step", namespace["longer"])
    assert len(walk().stations) > most.stations
