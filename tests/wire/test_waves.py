"""Waves: the table, and every interleaving of small groups against a model of the ranks.

Run with ``-s`` to see how many states each search visits.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import pytest

from engine_client.wire.waves import TRANSITIONS, Wake, WaveEvent, WavePhase, WaveState


def test_the_table_is_complete() -> None:
    """Every phase has an answer to every event."""
    assert set(TRANSITIONS) == {(phase, event) for phase in WavePhase for event in WaveEvent}


def test_a_request_wakes_a_sleeping_group_and_again_until_it_is_confirmed() -> None:
    """A wake-up that a paused group discarded is sent again with the next request."""
    state = WaveState()
    assert state.request(1) == Wake(0, 1)
    assert state.request(0) == Wake(0, 0)
    assert state.started(0, 0) == Wake(0, 0)
    assert state.running
    assert state.request(1) is None


def test_a_wake_up_that_nobody_confirms_is_repeated() -> None:
    """One may be lost to a pause that a rank had not left yet."""
    state = WaveState()
    assert state.remind() is None
    state.request(0)
    assert state.remind() == Wake(0, None)
    state.started(0, 0)
    assert state.remind() is None


def test_a_wave_counts_once_however_many_ranks_complete_it() -> None:
    """Without a coordinator every rank reports the end of a wave."""
    state = WaveState()
    state.request(0)
    state.stepped(0)
    assert state.completed(1, 0) is None
    assert (state.wave, state.phase) == (1, WavePhase.PAUSED)
    assert state.completed(0, 0) is None
    assert state.wave == 1


def test_a_request_that_came_too_late_for_its_wave_is_woken_for() -> None:
    """A wave that completes with a live request wakes all ranks for the next one."""
    state = WaveState()
    state.request(0)
    state.stepped(0)
    assert state.completed(0, 0, live=True) == Wake(1, None)


def test_tokens_of_the_last_wave_do_not_confirm_the_next() -> None:
    """A rank's tokens count for a wave once it has itself reported the end of the one before."""
    state = WaveState()
    state.request(0)
    state.completed(1, 0, live=True)
    state.stepped(0)
    assert state.phase is WavePhase.WOKEN
    state.completed(0, 0)
    state.stepped(0)
    assert state.running


def test_an_old_start_is_ignored_and_a_newer_one_followed() -> None:
    """A rank that started knows the current wave better."""
    state = WaveState()
    state.completed(0, 2)
    assert state.started(1, 1) is None
    assert state.started(1, 5) == Wake(5, 1)
    assert (state.wave, state.running) == (5, True)


def test_a_stale_request_wakes_every_rank() -> None:
    """The rank that has it must be told the current wave too."""
    state = WaveState()
    state.completed(0, 0)
    assert state.request(1, wave=0) == Wake(1, None)


def test_a_publish_is_followed() -> None:
    """An external coordinator's word replaces what was concluded here."""
    state = WaveState()
    state.published(7, False)
    assert state.request(0) == Wake(7, 0)
    state.published(7, True)
    assert state.request(0) is None
    state.published(8, False)
    assert state.phase is WavePhase.PAUSED


def test_a_publish_does_not_end_the_reminders() -> None:
    """A group that does not run while a request is live is woken again."""
    state = WaveState()
    state.request(0)
    state.published(0, False, live=True)
    assert state.remind() == Wake(0, None)


# A model of a group -------------------------------------------------------------------------------
#
# Ranks as vLLM 0.32 has them, one client, whoever keeps the wave; every connection keeps its order,
# and nothing else is in order.  Requests are counted, not named.


class Rank(NamedTuple):
    """One rank: what it knows, what is on its way to it, what it has said.

    Each message is a tuple; if it names a wave, that comes second.
    """

    wave: int = 0
    running: bool = False
    was_running: bool = False
    """As its last step ended."""
    work: int = 0
    """Requests that it has not finished."""
    pausing: bool = False
    """It was told to pause, and steps with the others until all have been."""
    paused: bool = False
    waits: Literal["", "step", "resume"] = ""
    """The collective that it has entered: it hears nothing until all have."""
    inbox: tuple[Any, ...] = ()
    """From the client: requests, pauses, and wake-ups where there is no coordinator."""
    broadcasts: tuple[Any, ...] = ()
    """From the coordinator."""
    outputs: tuple[Any, ...] = ()
    """To the client."""
    reports: tuple[Any, ...] = ()
    """To the coordinator."""


class World(NamedTuple):
    """Everything that can differ."""

    ranks: tuple[Rank, ...]
    client: tuple[int, WavePhase] = (0, WavePhase.PAUSED)
    ends: tuple[int, ...] = ()
    """For each rank, how many waves it has told the client that it ended."""
    coordinator: tuple[int, WavePhase] | None = None
    """What an external one knows."""
    notices: tuple[Any, ...] = ()
    """From the client to the external coordinator."""
    publishes: tuple[Any, ...] = ()
    """From that to the client."""
    unsent: int = 0
    pauses: int = 0
    """Calls to come that pause the group, or let it go on."""
    paused: bool = False
    """Whether the last of these was a pause."""
    live: int = 0
    """Requests whose last output the client has not seen."""

    def with_rank(self, index: int, **changes: Any) -> World:
        """The same with one rank changed."""
        rank = self.ranks[index]._replace(**changes)
        return self._replace(ranks=(*self.ranks[:index], rank, *self.ranks[index + 1 :]))


Keeper = Literal["none", "in process", "external"]
LAG = 2
"""Messages by which a connection may be behind when the group steps."""


class Model:
    """What can happen next.

    Args:
        keeper: who keeps the wave.
        state: the rules under test.
        reminds: whether the client repeats a wake-up that nobody confirmed.
        rests: whether no rank may be left waiting for others, even without work.
        reduced: leave out orders of events that make no difference.
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        state: type[WaveState] = WaveState,
        reminds: bool = True,
        rests: bool = True,
        reduced: bool = True,
    ) -> None:
        self.keeper = keeper
        self.coordinated = keeper != "none"
        self.reminds = reminds
        self.rests = rests
        self.reduced = reduced
        self._make = state

    def after(self, world: World) -> tuple[list[World], list[World]]:
        """Every world one event away: what happens by itself, and what the user may do."""
        ranks = world.ranks
        waits = {rank.waits for rank in ranks}
        lags = any(len(r.outputs) > LAG or len(r.reports) > LAG for r in ranks)
        lags = lags or len(world.publishes) > LAG or len(world.notices) > LAG
        found: list[World] = []
        if waits == {"step"} and not lags:
            stepped = self._step(world)
            if self.reduced:
                return [stepped], []
            found = [stepped]
        elif waits == {"resume"}:
            found = [self._resume(world)]
        for index, rank in enumerate(ranks):
            if rank.waits:
                continue
            mine = []
            if rank.inbox:
                mine.append(self._handle(world, index, "inbox"))
            if rank.broadcasts:
                mine.append(self._handle(world, index, "broadcasts"))
            if rank.running or (rank.work and not rank.pausing and not rank.paused):
                mine.append(world.with_rank(index, waits="step"))
            if self.reduced and rank.inbox and (rank.broadcasts or not self.coordinated):
                # Nothing that others do changes what this rank can do now, or the other way round.
                return mine, []
            found += mine
        for index, rank in enumerate(ranks):
            if rank.outputs:
                found.append(self._receive(world, index))
            if rank.reports:
                found.append(self._report(world, index))
        if world.notices:
            found.append(self._notice(world))
        if world.publishes:
            _, wave, running = world.publishes[0]
            state = self._state(world.client)
            state.published(wave, running, live=world.live > 0)
            found.append(self._keep(world._replace(publishes=world.publishes[1:]), state))
        elif world.coordinator is not None and world.coordinator != world.client:
            # From time to time, also when nothing has changed.
            found.append(self._publish(world))
        found += self._remind(world)
        return found, self._user(world)

    def is_done(self, world: World) -> bool:
        """Whether nothing is left to do."""
        waits = any(rank.work or (self.rests and rank.waits) for rank in world.ranks)
        return not world.live and not waits

    # -- the client ----------------------------------------------------------------------------

    def _user(self, world: World) -> list[World]:
        found = []
        if world.unsent:
            for index in range(len(world.ranks)):
                # A request is stamped before its turn comes: the wave may have ended since.
                for stamp in (world.client[0], world.client[0] - 1):
                    for kind in ("add", "refuse"):
                        after = self._request(world, index)
                        inbox = (*after.ranks[index].inbox, (kind, stamp))
                        after = after.with_rank(index, inbox=inbox)
                        found.append(after._replace(unsent=world.unsent - 1, live=world.live + 1))
        # A group is told to go on once its pause has been answered.
        answered = not any(rank.pausing or ("pause",) in rank.inbox for rank in world.ranks)
        if world.pauses and (not world.paused or answered):
            message = ("resume" if world.paused else "pause",)
            ranks = tuple(rank._replace(inbox=(*rank.inbox, message)) for rank in world.ranks)
            found.append(
                world._replace(ranks=ranks, paused=not world.paused, pauses=world.pauses - 1)
            )
        return found

    def _request(self, world: World, index: int) -> World:
        state = self._state(world.client)
        if self.keeper != "external":
            return self._wake(self._keep(world, state), state, state.request(index))
        if state.phase is not WavePhase.PAUSED:
            return world
        state.request(index)
        return self._keep(world, state)._replace(
            notices=(*world.notices, ("notice", state.wave, index))
        )

    def _remind(self, world: World) -> list[World]:
        state = self._state(world.client)
        wake = state.remind()
        if not self.reminds or wake is None:
            return []
        if self.keeper == "external" and self.is_done(world):
            return []  # which only lengthens a long search
        if self.keeper == "external":
            # The next comes when nothing of the last one is on its way any more.
            heard = not any(rank.broadcasts and not rank.waits for rank in world.ranks)
            if world.notices or world.publishes or not heard:
                return []
            # A coordinator leaves out the rank that a notice names, unless its wave is old.
            return [world._replace(notices=(("notice", state.wave - 1, 0),))]
        # One on its way to each rank is enough to look at.
        message = ("start", wake.wave, None)
        channel = "broadcasts" if self.coordinated else "inbox"
        if all(message in getattr(rank, channel) for rank in world.ranks):
            return []
        return [self._wake(world, state, wake, again=False)]

    def _receive(self, world: World, index: int) -> World:
        message, *rest = world.ranks[index].outputs
        world = world.with_rank(index, outputs=tuple(rest))
        state = self._state(world.client)
        if message[0] != "complete":
            if message[0] == "output" and not self.coordinated:
                state.ends = dict(enumerate(world.ends))
                state.stepped(index)
            return self._keep(world, state)._replace(live=world.live - 1)
        wake = state.completed(index, message[1], live=world.live > 0)
        ends = tuple(state.ends.get(rank, end) for rank, end in enumerate(world.ends))
        return self._wake(self._keep(world._replace(ends=ends), state), state, wake)

    # -- the coordinator -----------------------------------------------------------------------

    def _report(self, world: World, index: int) -> World:
        (kind, wave), *rest = world.ranks[index].reports
        world = world.with_rank(index, reports=tuple(rest))
        inside = self.keeper == "in process"
        before = world.client if inside else world.coordinator
        assert before is not None
        state = self._state(before)
        wake = state.started(index, wave) if kind == "start" else state.completed(index, wave)
        world = self._wake(world, state, wake)
        if inside:
            return self._keep(world, state)
        world = world._replace(coordinator=(state.wave, state.phase))
        return world if world.coordinator == before else self._publish(world)

    def _notice(self, world: World) -> World:
        _, wave, target = world.notices[0]
        assert world.coordinator is not None
        state = self._state(world.coordinator)
        wake = state.request(target, wave)
        world = world._replace(notices=world.notices[1:], coordinator=(state.wave, state.phase))
        return self._wake(world, state, wake)

    def _publish(self, world: World) -> World:
        assert world.coordinator is not None
        wave, phase = world.coordinator
        news = ("publish", wave, phase is WavePhase.RUNNING)
        return world._replace(publishes=(*world.publishes, news))

    def _state(self, known: tuple[int, WavePhase]) -> WaveState:
        state = self._make()
        state.wave, state.phase = known
        return state

    def _keep(self, world: World, state: WaveState) -> World:
        return world._replace(client=(state.wave, state.phase))

    def _wake(
        self, world: World, state: WaveState, wake: Wake | None, *, again: bool = True
    ) -> World:
        if self.keeper != "external":
            world = self._keep(world, state)
        if wake is None:
            return world
        message = ("start", wake.wave, wake.exclude)
        ranks = []
        for index, rank in enumerate(world.ranks):
            if self.coordinated:
                more = again and self.keeper == "in process"
                if more or message not in rank.broadcasts:
                    rank = rank._replace(broadcasts=(*rank.broadcasts, message))
            elif index != wake.exclude and (again or message not in rank.inbox):
                rank = rank._replace(inbox=(*rank.inbox, message))
            ranks.append(rank)
        return world._replace(ranks=tuple(ranks))

    # -- the ranks -----------------------------------------------------------------------------

    def _handle(self, world: World, index: int, channel: Literal["inbox", "broadcasts"]) -> World:
        rank = world.ranks[index]
        message, *rest = getattr(rank, channel)
        world = world.with_rank(index, **{channel: tuple(rest)})
        kind, *fields = message
        if kind == "pause":
            return world.with_rank(index, pausing=True, running=True)
        if kind == "resume":
            return world.with_rank(index, waits="resume")
        if kind == "start":
            wave, exclude = fields
            if rank.paused or exclude == index or wave < rank.wave:
                return world
            return world.with_rank(index, wave=wave, running=True)
        if kind == "refuse":  # or aborted before it was looked at: nothing is stepped for it
            return world.with_rank(index, outputs=(*rank.outputs, ("refused",)))
        world = world.with_rank(index, work=rank.work + 1)
        (wave,) = fields
        if self.coordinated and wave > rank.wave:
            return world.with_rank(index, wave=wave)
        idle = not (rank.running or rank.pausing or rank.paused)
        if self.coordinated and wave < rank.wave and idle:
            reports = (*rank.reports, ("start", rank.wave))
            return world.with_rank(index, running=True, reports=reports)
        return world

    def _step(self, world: World) -> World:
        """One step of all: each rank finishes one request; when none is left the wave ends."""
        pausing = sum(rank.pausing for rank in world.ranks)
        left = 0 < pausing < len(world.ranks)
        ranks = []
        for rank in world.ranks:
            if rank.work and not rank.pausing:
                rank = rank._replace(work=rank.work - 1, outputs=(*rank.outputs, ("output",)))
                left = left or rank.work > 0
            if pausing == len(world.ranks):
                rank = rank._replace(pausing=False, paused=True)
            ranks.append(rank._replace(waits=""))
        for index, rank in enumerate(ranks):
            report: tuple[Any, ...] = ()
            changes: dict[str, Any] = {"running": left, "was_running": left}
            if not left:
                changes["wave"] = rank.wave + 1
                if not self.coordinated:
                    changes["outputs"] = (*rank.outputs, ("complete", rank.wave))
                elif index == 0:
                    report = (("complete", rank.wave),)
            elif self.coordinated and index == 0 and not rank.was_running and not rank.pausing:
                report = (("start", rank.wave),)
            ranks[index] = rank._replace(**changes, reports=(*rank.reports, *report))
        return world._replace(ranks=tuple(ranks))

    def _resume(self, world: World) -> World:
        left = any(rank.work for rank in world.ranks)
        ranks = tuple(rank._replace(waits="", paused=False, running=left) for rank in world.ranks)
        return world._replace(ranks=ranks)


def rebased(world: World) -> World:
    """The same with waves counted anew, from just below the oldest that anybody is in.

    Waves are only compared, and none that is older than all of these is told from another, so
    worlds that differ in nothing else have the same future.
    """
    known = [world.client[0], *(rank.wave for rank in world.ranks)]
    if world.coordinator is not None:
        known.append(world.coordinator[0])
    least = min(known) - 1
    if least <= 0:
        return world

    def moved(queue: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple((m[0], max(0, m[1] - least), *m[2:]) if len(m) > 1 else m for m in queue)

    ranks = (
        rank._replace(
            wave=rank.wave - least,
            inbox=moved(rank.inbox),
            broadcasts=moved(rank.broadcasts),
            outputs=moved(rank.outputs),
            reports=moved(rank.reports),
        )
        for rank in world.ranks
    )
    coordinator = world.coordinator
    return world._replace(
        ranks=tuple(ranks),
        client=(world.client[0] - least, world.client[1]),
        ends=tuple(max(0, end - least) for end in world.ends),
        coordinator=coordinator and (coordinator[0] - least, coordinator[1]),
        notices=moved(world.notices),
        publishes=moved(world.publishes),
    )


class Explored(NamedTuple):
    """What was found."""

    states: int
    lost: list[World]
    """Worlds with work to do that never gets done, whatever happens by itself."""


def explore(model: Model, start: World, limit: int = 5_000_000) -> Explored:
    """Visit every reachable world."""
    numbers = {start: 0}
    worlds = [start]
    before: list[list[int]] = [[]]
    for number, world in enumerate(worlds):  # which grows meanwhile
        happens, asked = model.after(world)
        for by_itself, found in ((True, happens), (False, asked)):
            for after in found:
                after = rebased(after)
                other = numbers.setdefault(after, len(worlds))
                if other == len(worlds):
                    worlds.append(after)
                    before.append([])
                if by_itself:
                    before[other].append(number)
        assert len(worlds) < limit, "too many states"
    # Backwards from the worlds in which all is done.
    fine = {number for number, world in enumerate(worlds) if model.is_done(world)}
    todo = list(fine)
    while todo:
        new = set(before[todo.pop()]) - fine
        fine |= new
        todo += new
    lost = [w for n, w in enumerate(worlds) if n not in fine and not w.paused]
    return Explored(len(worlds), lost)


CASES: list[tuple[Keeper, int, int, int]] = [
    ("none", 2, 2, 0),
    ("none", 2, 1, 2),
    ("none", 3, 1, 0),
    ("in process", 2, 1, 2),
    ("in process", 3, 1, 0),
    ("external", 2, 1, 0),
    ("external", 3, 1, 0),
]
LONG_CASES: list[tuple[Keeper, int, int, int]] = [
    ("none", 2, 3, 0),
    ("none", 2, 2, 2),
    ("none", 2, 1, 4),
    ("none", 3, 2, 0),
    ("none", 4, 1, 0),
    ("in process", 2, 2, 0),
    ("in process", 2, 1, 4),
    ("in process", 3, 1, 2),
    ("external", 2, 1, 2),
    ("external", 2, 2, 0),
]
NAMES = ("keeper", "ranks", "requests", "pauses")


def start(keeper: Keeper, ranks: int, requests: int, pauses: int) -> World:
    """A group that has just started."""
    coordinator = (0, WavePhase.PAUSED) if keeper == "external" else None
    ends = (0,) * ranks if keeper == "none" else ()
    return World(
        (Rank(),) * ranks, ends=ends, coordinator=coordinator, unsent=requests, pauses=pauses
    )


def check(keeper: Keeper, ranks: int, requests: int, pauses: int, *, reduced: bool = True) -> None:
    # A wake-up that reaches one rank before a resume and another after it leaves that one waiting
    # until the next wake-up.  A client of an external coordinator cannot tell, once it has no
    # request there any more, and the group is published as asleep.
    rests = keeper != "external" or not pauses
    model = Model(keeper, rests=rests, reduced=reduced)
    states, lost = explore(model, start(keeper, ranks, requests, pauses))
    print(f"{keeper}: {ranks} ranks, {requests} requests, {pauses} pauses: {states:,} states")
    assert states > 100
    assert not lost, lost[0]


@pytest.mark.parametrize(NAMES, CASES)
def test_no_work_is_left(keeper: Keeper, ranks: int, requests: int, pauses: int) -> None:
    """From every world that can be reached, all work gets done without the user's help."""
    check(keeper, ranks, requests, pauses)


@pytest.mark.parametrize("keeper", ["none", "in process"])
def test_no_work_is_left_in_any_order(keeper: Keeper) -> None:
    """The same without leaving out orders that make no difference."""
    check(keeper, 2, 1, 0, reduced=False)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(NAMES, LONG_CASES)
def test_no_work_is_left_in_larger_groups(
    keeper: Keeper, ranks: int, requests: int, pauses: int
) -> None:
    """The same for more requests, pauses and ranks."""
    check(keeper, ranks, requests, pauses)


# What the rules are for: without one of them, the search finds work that is never done -----------


class Assuming(WaveState):
    """Takes a group for running because it was told to run."""

    __slots__ = ()

    def request(self, rank: int, wave: int | None = None) -> Wake | None:
        wake = super().request(rank, wave)
        self.phase = WavePhase.RUNNING
        return wake


class Forgetful(WaveState):
    """Does not look for requests that came too late for their wave."""

    __slots__ = ()

    def completed(self, rank: int, wave: int, *, live: bool = False) -> Wake | None:
        return super().completed(rank, wave)


class Excluding(WaveState):
    """Does not tell the rank that has a request of an old wave."""

    __slots__ = ()

    def completed(self, rank: int, wave: int, *, live: bool = False) -> Wake | None:
        wake = super().completed(rank, wave, live=live)
        return wake and Wake(wake.wave, 0)


class Hasty(WaveState):
    """Takes tokens of the last wave for those of the next."""

    __slots__ = ()

    def stepped(self, rank: int) -> None:
        self.ends = {rank: self.wave}
        super().stepped(rank)


class Trusting(WaveState):
    """Takes a publish for the end of everything."""

    __slots__ = ()

    def published(self, wave: int, running: bool, *, live: bool = False) -> None:
        super().published(wave, running)
        if not running:
            self.phase = WavePhase.PAUSED


@pytest.mark.parametrize(
    ("keeper", "rules", "reminds", "requests", "pauses"),
    [
        ("in process", Assuming, True, 1, 2),
        ("in process", WaveState, False, 1, 2),
        ("none", Forgetful, False, 2, 0),
        ("none", Excluding, False, 2, 0),
        ("none", WaveState, False, 1, 0),
        pytest.param("none", Hasty, True, 2, 2, marks=pytest.mark.long),
        ("external", Trusting, True, 1, 0),
    ],
)
def test_each_rule_is_needed(
    keeper: Keeper, rules: type[WaveState], reminds: bool, requests: int, pauses: int
) -> None:
    """The search tells a broken rule: there is work that nobody ever does."""
    model = Model(keeper, state=rules, reminds=reminds)
    assert explore(model, start(keeper, 2, requests, pauses)).lost
