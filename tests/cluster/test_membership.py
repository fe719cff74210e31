"""An agent's link to the coordinator: for how long it connects again, and at which port it finds it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recover.authentication.handshake import OTHER_PROTOCOL, Party, Role
from megatron_recover.cluster import endpoint_file, joining
from megatron_recover.cluster import membership as members
from megatron_recover.cluster.endpoint_file import claim, publish
from megatron_recover.cluster.joining import Place
from megatron_recover.cluster.meeting import JOIN_S, MISSING_JOBS, Meeting
from megatron_recover.cluster.membership import Membership
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.control_plane.gate import Gate
from megatron_recover.control_plane.job_start import NodesSettings
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import Idle, JobEnds, Met, NodeBeat, NodeHello, StartAnew
from megatron_recover.control_plane.node_watch import PREPARING_SILENCES
from megatron_recover.control_plane.nodes_driver import NodesDriver
from megatron_recover.control_plane.wire import Link, Message, listen
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import HOST, address_of, bind_free
from megatron_recover.trace.node_clock import NodeClock
from tests.control_plane.partners import KEY


def test_a_long_wait_for_other_nodes_is_no_long_wait_for_a_lost_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A powered-off node refuses nothing, so the time decides when an agent knows that its coordinator is lost."""
    monkeypatch.setattr(Membership, "_connect", lambda self: None)
    loop = Loop()
    a_week_s = 7.0 * 86400
    membership: Any = Membership(
        "127.0.0.1:1", NodeHello(1, "a", 1), key=b"k", clock=Any, loop=loop, deadlines=Deadlines.of(60.0), patience_s=a_week_s
    )  # type: ignore[arg-type]
    assert membership._give_up_at - loop.time() == pytest.approx(a_week_s, abs=1.0)
    membership._link = SimpleNamespace(proven=True)
    membership._ended(membership._link, "broken")
    assert membership._give_up_at - loop.time() == pytest.approx(JOIN_S, abs=1.0)
    loop.close()


@pytest.mark.parametrize("is_idle", [False, True])
def test_an_agent_that_meets_the_coordinator_of_another_start_knows_that_its_own_is_lost(is_idle: bool) -> None:
    loop, heard, why = Loop(), list[Message](), list[str]()
    with bind_free(HOST) as free:
        address = address_of(free)

    def coordinate(owner: int) -> NodesDriver:
        listener = listen(address)
        settings = NodesSettings(
            owner=owner, least=1, most=1, join_s=60.0, last_call_s=0.0, node_silence_s=60.0, deadlines=Deadlines.of(60.0)
        )
        return NodesDriver(settings, listener, key=KEY, clock=NodeClock(None), loop=loop, record=lambda event: None)

    def until(condition: Callable[[], object]) -> None:
        end = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < end
            loop.run_once(0.05)

    def join(identity: int) -> Membership:
        return Membership(
            address, NodeHello(identity, "a", 1), key=KEY, clock=NodeClock(None), loop=loop, deadlines=Deadlines.of(60.0),
            patience_s=60.0,
        )  # fmt: skip

    first = coordinate(1)
    membership = join(1)
    if is_idle:
        until(lambda: first._start.nodes)
        membership.handle(lambda message: None, lambda why: None)
        membership.is_lost, membership = True, join(3)
    membership.handle(heard.append, why.append)
    until(lambda: heard)
    assert isinstance(heard[0], Idle if is_idle else Met)
    first.close()
    for agent in first._agents:
        loop.drop(agent.link)
    second = coordinate(2)
    until(lambda: why)
    assert why == ["another job has begun at its address"] and membership.is_lost and not list(second._agents)
    second.close()
    loop.close()


def test_a_node_whose_number_was_lost_with_its_link_introduces_itself_as_another_one() -> None:
    loop = Loop()
    listener = listen(f"{HOST}:0")
    address, deadlines = address_of(listener), Deadlines.of(60.0)
    hellos, links = list[NodeHello](), list[Link]()

    def accept(link: Link, peer: Party) -> None:
        links.append(link)
        loop.watch(link, lambda link, message: hellos.append(message) if isinstance(message, NodeHello) else None, ignore)

    def ignore(link: Link, why: str) -> None:
        pass

    gate = Gate(
        loop, listener, KEY, Role.COORDINATOR, lambda peer, wanted: True, accept, clock=NodeClock(None),
        expects=lambda: 4, also=(), report=lambda name, number: None,
    )  # fmt: skip
    membership = Membership(
        address, NodeHello(7, "a", 1), key=KEY, clock=NodeClock(None), loop=loop, deadlines=deadlines, patience_s=60.0
    )
    heard = joining._Heard("", membership.greet_anew)
    membership.handle(heard.take, heard.lose)

    def until(condition: Callable[[], object]) -> None:
        end = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < end
            loop.run_once(0.05)

    until(lambda: hellos)
    loop.send(links[0], StartAnew())
    until(lambda: len(hellos) == 2)
    assert hellos[0].identity == 7 != hellos[1].identity and replace(hellos[1], identity=7) == hellos[0]
    loop.send(links[1], Met((), 3, "/run", ""))
    until(lambda: heard.met)
    loop.send(links[1], StartAnew())
    loop.send(links[1], Idle("it is read"))
    until(lambda: heard.is_idle)
    assert len(hellos) == 2, "who knows its number ends its run instead"
    membership.close()
    gate.close()
    loop.close()


def test_all_addresses_of_the_endpoint_are_tried_in_turn_and_the_one_that_has_answered_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the first address nobody listens, at the second nobody answers, and at the third there is the key of another job."""
    monkeypatch.setattr(members, "_TRY_S", 0.2)
    loop, heard, deadlines = Loop(), list[Message](), Deadlines.of(60.0)
    settings = NodesSettings(owner=1, least=1, most=1, join_s=60.0, last_call_s=0.0, node_silence_s=60.0, deadlines=deadlines)
    listener, silent, stranger = listen("127.0.0.5:0"), listen("127.0.0.3:0"), listen("127.0.0.4:0")
    drivers = [
        NodesDriver(settings, each, key=key, clock=NodeClock(None), loop=loop, record=lambda event: None)
        for each, key in ((listener, KEY), (stranger, bytes(32)))
    ]
    addresses = ["127.0.0.2:1", *map(address_of, (silent, stranger, listener))]
    membership = Membership(
        addresses[0], NodeHello(1, "a", 1), key=KEY, clock=NodeClock(None), loop=loop, deadlines=deadlines, patience_s=60.0,
        others=addresses[1:],
    )  # fmt: skip
    membership.handle(heard.append, lambda why: None)
    end = time.monotonic() + 30.0
    while not heard:
        assert time.monotonic() < end and not membership.refusal and not membership.is_lost
        loop.run_once(0.05)
    assert membership.address == addresses[3] and type(heard[0]) is Met
    kept = time.monotonic() + 0.6  # the time for a try is over, and the link that has answered stays
    while time.monotonic() < kept:
        loop.run_once(0.05)
    assert not drivers[0].has_ended
    drivers[0].close()
    [agent] = drivers[0]._agents
    loop.drop(agent.link)
    while not membership.is_lost:
        assert time.monotonic() < end and membership.address == addresses[3]
        loop.run_once(0.05)
    assert membership._addresses == (addresses[3],)
    drivers[1].close()
    silent.close()
    loop.close()


@pytest.mark.parametrize(("num_rounds", "tries_s"), [(0, 2.0), (2, 8.0), (3, 16.0), (9000, 16.0)])
def test_a_try_at_one_of_several_addresses_stays_short_however_long_the_node_has_tried(
    num_rounds: int, tries_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that begins to listen at the other address meanwhile is found soon."""
    loop, tried_s, listener = Loop(), list[float](), listen("127.0.0.4:0")
    membership = Membership(
        address_of(listener), NodeHello(1, "a", 1), key=KEY, clock=NodeClock(None), loop=loop, deadlines=Deadlines.of(60.0),
        patience_s=600.0, others=["127.0.0.2:1"],
    )  # fmt: skip
    membership._num_tries = 2 * num_rounds
    monkeypatch.setattr(loop, "after", lambda delay_s, call: tried_s.append(delay_s))
    membership._connect()
    assert tried_s == [tries_s]
    membership.close()
    listener.close()
    loop.close()


def test_the_key_of_another_job_at_one_address_is_told_once_all_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_TRY_S", 0.2)
    loop, deadlines = Loop(), Deadlines.of(60.0)
    settings = NodesSettings(owner=1, least=1, most=1, join_s=60.0, last_call_s=0.0, node_silence_s=60.0, deadlines=deadlines)
    listener = listen("127.0.0.4:0")
    driver = NodesDriver(settings, listener, key=bytes(32), clock=NodeClock(None), loop=loop, record=lambda event: None)
    membership = Membership(
        address_of(listener), NodeHello(1, "a", 1), key=KEY, clock=NodeClock(None), loop=loop, deadlines=deadlines,
        patience_s=60.0, others=["127.0.0.2:1"],
    )  # fmt: skip
    end = time.monotonic() + 30.0
    while not membership.refusal:
        assert time.monotonic() < end
        loop.run_once(0.05)
    assert membership._num_tries >= 1
    membership.close()
    driver.close()
    loop.close()


def test_signs_of_life_go_on_while_the_thread_of_an_agent_is_busy_and_messages_wait() -> None:
    loop, heard = Loop(), list[Message]()
    deadlines = replace(Deadlines.of(60.0), beat_s=0.02)
    settings = NodesSettings(
        owner=1, least=1, most=1, join_s=60.0, last_call_s=0.0, node_silence_s=60.0, deadlines=deadlines
    )  # fmt: skip
    coordinator_loop, listener = Loop(), listen(HOST + ":0")
    driver = NodesDriver(settings, listener, key=KEY, clock=NodeClock(None), loop=coordinator_loop, record=lambda event: None)
    membership = Membership(
        address_of(listener), NodeHello(1, "a", 1), key=KEY, clock=NodeClock(None), loop=loop, deadlines=deadlines,
        patience_s=60.0,
    )  # fmt: skip
    end = time.monotonic() + 30.0
    with membership.kept():
        while not driver._start.nodes and time.monotonic() < end:
            coordinator_loop.run_once(0.02)
        driver._watch._nodes[0].heard_at = before = coordinator_loop.time()
        while driver._watch._nodes[0].heard_at == before and time.monotonic() < end:
            coordinator_loop.run_once(0.02)
        assert driver._watch._nodes[0].heard_at > before and not heard
        time.sleep(0.1)  # `Met` is read
    membership.handle(heard.append, lambda why: None)
    assert [type(each) for each in heard] == [Met]
    driver.close()
    coordinator_loop.close()
    loop.close()


def test_no_sign_of_life_is_queued_for_a_coordinator_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "_connect", lambda self: None)
    loop, sent = Loop(), list[Message]()
    membership: Any = Membership(
        "127.0.0.1:1", NodeHello(1, "a", 1), key=b"k", clock=Any, loop=loop, deadlines=Deadlines.of(60.0), patience_s=60.0
    )  # type: ignore[arg-type]
    membership.send = sent.append
    membership.beat()
    for proven, wants_write in ((False, False), (True, True), (True, False)):
        assert not sent
        membership._link = SimpleNamespace(proven=proven, wants_write=wants_write)
        membership.beat()
    assert sent == [NodeBeat()]
    loop.close()


def test_a_coordinator_that_a_file_names_has_a_port_of_the_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bind_free(HOST) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(members.subprocess, "Popen", lambda *_, **__: SimpleNamespace())
    meeting = Meeting(least_nodes=2, most_nodes=2, endpoint_file=tmp_path / "e", ports=(port, port), local_addr=HOST)
    own = Place(meeting, Deadlines.of(60.0), EndRequest())._own(1, b"k" * 32, "faults", 0)
    assert own is not None and own[0].address == f"{HOST}:{port}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["127.0.0.2", "127.0.0.3"]),
        ({"local_addr": "127.0.0.3"}, ["127.0.0.3"]),
        ({"local_addr": "127.0.0.4"}, ["127.0.0.4", "127.0.0.2", "127.0.0.3"]),
    ],
    ids=["no flag", "one of the name", "another"],
)
def test_the_coordinator_is_reached_at_each_address_of_the_owners_name_or_at_the_one_that_is_given(
    given: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def start(command: list[str], *, pass_fds: tuple[int, ...], **_: Any) -> SimpleNamespace:
        for number in command[-4].split(","):
            assert int(number) in pass_fds
            with socket.socket(fileno=os.dup(int(number))) as listener:
                found.append(address_of(listener))
        return SimpleNamespace()

    monkeypatch.setattr(members.subprocess, "Popen", start)
    monkeypatch.setattr(joining.reachable, "endpoint_addresses", lambda *_, **__: ("127.0.0.2", "127.0.0.3"))
    with bind_free("127.0.0.2") as free:
        port = free.getsockname()[1]
    meeting = Meeting(least_nodes=2, most_nodes=2, host="head", port=port, node_rank=0, **given)
    place = Place(meeting, Deadlines.of(60.0), EndRequest())
    own = place._own(1, b"k" * 32, "faults", 0)
    assert own is not None and own[0].address == found[0] and found == [f"{each}:{port}" for each in expected]
    assert given.get("local_addr") in (None, place.address)


def test_a_signal_ends_the_wait_for_a_name_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    request: Any = SimpleNamespace(kept="")

    def getaddrinfo(*_: object, **__: object) -> None:
        request.kept = "SIGTERM"
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(joining.reachable.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(joining.reachable, "_ASK_S", 0.0)
    with pytest.raises(joining.NotMet, match="SIGTERM before training began") as end:
        Place(Meeting(least_nodes=2, most_nodes=2, host="head", flag="--master-addr"), Deadlines.of(60.0), request)
    assert end.value.exit_code == ExitCode.INTERRUPTED
    assert capsys.readouterr().err.count("this is asked again, for at most 600 s") == 1


def _file_meeting(folder: Path, **given: Any) -> Meeting:
    fields = {"local_addr": HOST, "join_s": 30, **given}
    return Meeting(least_nodes=2, most_nodes=2, endpoint_file=folder / "endpoint", **fields)


def test_a_node_that_meets_the_others_anew_claims_no_file_although_nobody_else_has(tmp_path: Path) -> None:
    meeting = _file_meeting(tmp_path, is_host=False)
    assert meeting.endpoint_file is not None
    publish(meeting.endpoint_file, f"{HOST}:1")
    assert not Place(meeting, Deadlines.of(60.0), EndRequest()).may_own
    assert not os.path.lexists(endpoint_file.owner_file(meeting.endpoint_file))
    assert Place(replace(meeting, is_host=None), Deadlines.of(60.0), EndRequest()).may_own


def test_a_node_without_an_address_claims_no_endpoint_that_others_would_wait_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--interface"):
        Place(_file_meeting(tmp_path, local_addr=None, interface="none9"), Deadlines.of(60.0), EndRequest())
    assert not list(tmp_path.iterdir())
    assert Place(_file_meeting(tmp_path), Deadlines.of(60.0), EndRequest()).may_own


def test_an_owner_that_can_start_no_coordinator_ends_the_others_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "TELL_S", 0.3)
    owner = Place(_file_meeting(tmp_path), Deadlines.of(60.0), EndRequest())
    with bind_free(HOST) as taken, ThreadPoolExecutor(1) as pool:
        taken.listen()
        waiting = pool.submit(Place, _file_meeting(tmp_path), Deadlines.of(60.0), EndRequest())
        monkeypatch.setattr(owner, "_meeting", replace(owner._meeting, ports=(taken.getsockname()[1],) * 2))
        with pytest.raises((ValueError, OSError)):
            owner.join(key=KEY, level="faults", slots=1, run_dir=Path, run_id="", alike=())
        with pytest.raises(joining.NotMet, match="no job begins here, as .*nothing can listen") as end:
            waiting.result(10.0)
    assert end.value.exit_code == ExitCode.BAD_INPUT and not end.value.is_of_owner


def test_an_address_that_was_read_from_a_file_is_dialled_for_no_week(tmp_path: Path) -> None:
    publish(tmp_path / "endpoint", f"{HOST}:1")
    (tmp_path / "endpoint.owner").touch()
    place: Any = Place(_file_meeting(tmp_path, join_s=7 * 86400), Deadlines.of(60.0), EndRequest())
    assert place._dial_s == JOIN_S
    known_s = JOIN_S + PREPARING_SILENCES * place._meeting.node_s
    silent: Any = SimpleNamespace(is_known=False, silent_s=lambda: known_s)
    assert place._silence(silent, "a:1").exit_code == ExitCode.TOO_FEW_REPLICAS


def test_an_owner_that_has_claimed_and_never_publishes_is_awaited_for_no_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "JOIN_S", 0.2)
    assert claim(tmp_path / "endpoint")
    (tmp_path / "endpoint.owner").write_text("n7")
    with pytest.raises(
        joining.NotMet, match=r"had no address after 0.2 s; n7 was to write it, as .*endpoint.owner says"
    ) as end:
        Place(_file_meeting(tmp_path, join_s=3600), Deadlines.of(60.0), EndRequest())
    assert (end.value.exit_code, end.value.stops) == (ExitCode.TOO_FEW_REPLICAS, False)


@pytest.mark.parametrize("by_file", [True, False])
def test_too_few_jobs_of_an_array_end_a_chain_and_too_few_nodes_of_an_allocation_do_not(tmp_path: Path, by_file: bool) -> None:
    """An allocation waits for ten minutes at most, and all of its nodes start together."""
    with bind_free(HOST) as free:
        port = free.getsockname()[1]
    given: dict[str, Any] = {} if by_file else {"endpoint_file": None, "host": HOST, "port": port}
    meeting = replace(_file_meeting(tmp_path, join_s=1), **given)
    with pytest.raises(joining.NotMet, match="^1 of 2 nodes was there after 1 s") as end:
        Place(meeting, Deadlines.of(60.0), EndRequest()).join(
            key=KEY, level="faults", slots=1, run_dir=lambda: tmp_path, run_id="", alike=()
        )
    assert (end.value.exit_code, end.value.stops) == (ExitCode.TOO_FEW_REPLICAS, by_file)
    assert (MISSING_JOBS in str(end.value)) == by_file
    assert ("run the same command on every node, or give --nnodes MIN:MAX" in str(end.value)) != by_file
    assert all(word in MISSING_JOBS for word in ("held", "QOS", "another array", "squeue --array", "--shape allocation"))
    assert MISSING_JOBS.startswith(
        "run the same command on every node, with a file that all of them see; in an array of Slurm "
    )


@pytest.mark.parametrize("too_few", [True, False])
def test_no_wording_of_the_coordinator_decides_whether_an_array_is_told_to_stop(tmp_path: Path, too_few: bool) -> None:
    """A run that has trained may end with the same code, and with any reason."""
    publish(tmp_path / "endpoint", f"{HOST}:1")
    (tmp_path / "endpoint.owner").touch()
    place: Any = Place(_file_meeting(tmp_path, join_s=1), Deadlines.of(60.0), EndRequest())
    heard: Any = joining._Heard()
    heard.take(JobEnds(ExitCode.TOO_FEW_REPLICAS, "reason" if too_few else f"reason; {MISSING_JOBS}", too_few=too_few))
    end = place._advised(heard.end, too_few=heard.too_few)
    assert (str(end), end.stops) == (f"reason; {MISSING_JOBS}", too_few)


def _unmet(place: Any, *, lost: str = "", refusal: str = "") -> str:
    """Return why a node can meet no others, whose link was `lost`, or whose handshake shows a `refusal`."""
    heard = SimpleNamespace(lost=lost, gives_up="", is_idle=False)
    return str(place._failure(SimpleNamespace(refusal=refusal), heard, f"{HOST}:1"))


def test_an_address_that_an_earlier_start_may_have_left_is_named_with_its_files(tmp_path: Path) -> None:
    file = tmp_path / "endpoint"
    publish(file, f"{HOST}:1")
    (tmp_path / "endpoint.owner").touch()
    place: Any = Place(_file_meeting(tmp_path, join_s=3), Deadlines.of(60.0), EndRequest())
    rest = (
        f"that address is in {file}, which an earlier start may have left: remove {file} and {file}.owner, or give each start "
        "a file of its own"
    )
    assert _unmet(place, lost="refused") == f"no coordinator was at {HOST}:1 for 3 s (refused); {rest}"
    silent: Any = SimpleNamespace(is_known=False, silent_s=lambda: 1000.0)
    assert str(place._silence(silent, f"{HOST}:1")) == f"what listens at {HOST}:1 did not answer for 1000 s; {rest}"
    assert _unmet(place, refusal="another key").endswith(f"(or MEGATRON_RECOVER_KEY) on all nodes; {rest}")


def test_a_node_that_finds_something_else_at_the_endpoint_is_told_so_and_not_of_its_key() -> None:
    meeting = Meeting(least_nodes=2, most_nodes=2, host=HOST, port=1, node_rank=1, flag="--master-addr")
    place: Any = Place(meeting, Deadlines.of(60.0), EndRequest())
    assert _unmet(place, refusal=OTHER_PROTOCOL) == (
        f"something else listens at {HOST}:1: {OTHER_PROTOCOL}; give the address of node 0 and a free port"
    )
    assert "give the same --key-file" in _unmet(place, refusal="another key")


def test_node_0_is_told_that_the_endpoint_is_no_address_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining.reachable, "interfaces", dict)
    monkeypatch.setattr(joining.reachable, "is_loopback", lambda address: address == "127.0.0.2")
    meeting = Meeting(
        least_nodes=2, most_nodes=2, host=HOST, port=1, node_rank=0, flag="--master-addr", local_addr="127.0.0.2", join_s=3
    )
    place: Any = Place(meeting, Deadlines.of(60.0), EndRequest())
    rest = f"{HOST} is no address of this node, which is --node-rank 0; give an address of this node by --master-addr"
    assert _unmet(place, lost="refused") == f"no coordinator was at {HOST}:1 for 3 s (refused); {rest}"
    assert _unmet(place, refusal=OTHER_PROTOCOL).endswith(f"{OTHER_PROTOCOL}; {rest}")


def test_a_node_with_a_mistake_says_that_the_job_runs_and_not_that_it_waits_for_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, said in (
        ("", "it runs: this node waits for the end of the job, or until it can be a spare"),
        ("this job already runs", "this job already runs"),
    ):
        joining._Heard(words).take(Idle("it runs"))
        assert capsys.readouterr().err == f"megatron-recover run: {said}\n"


@pytest.mark.parametrize(
    ("is_known", "limit_s", "code"), [(True, 60.0, ExitCode.FAILED), (False, 160.0, ExitCode.TOO_FEW_REPLICAS)]
)
def test_who_waits_for_others_does_not_wait_for_ever_on_what_accepts_and_says_nothing(
    is_known: bool, limit_s: float, code: ExitCode
) -> None:
    place: Any = Place(
        Meeting(least_nodes=2, most_nodes=2, host=HOST, join_s=100, node_s=10.0), Deadlines.of(60.0), EndRequest()
    )
    silences = [limit_s - 1.0, limit_s]
    ends = [place._silence(SimpleNamespace(is_known=is_known, silent_s=lambda: s), "a:1") for s in silences]  # noqa: B023
    assert ends[0] is None and ends[1].exit_code == code
