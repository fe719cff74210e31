"""List all rules, by the invariant that they judge.

A rule trusts the order of the lines (cause before effect, see `trace`). It does not trust what a
process reports about its own correctness.

Note [Orders that frames imply]. In a merged trace, two events of different nodes have an order only
if a frame of the control plane gives it to them. A rule may need no other order between nodes:

- INV-1: a plan is before the work that it deals (`Plan`), a miscount before the generation that
  makes the step void (`Miscounted`). Started and finished are of one rank. The rest compares sets.
- INV-2: votes are before commits (`Vote`), and results and state digests of ranks before the vote
  of their replica (`Holds`, `Begun`). A status is before an adoption (`Status`), a commit before
  its applies (`Apply`). That all ranks have applied a step before their leader commits the next one
  is implied by no frame: `CommittedIsApplied` asks the next event of each rank instead.
- INV-3: a commit is before its applies (`Apply`). Sums and backwards are of one rank.
- INV-4: a plan is before the results that it asks for (`Plan`). The rest compares sets.
- INV-5: results are before the status (`Holds`), an entry before the work of ranks (`Enter`). A
  rank's end is recorded by the agent of its own node, in the same file.
- INV-6: a join is before its generation (`LeaderHello`), a generation before its entries
  (`Announcement`), a commit before the checkpoint of the same replica (`Apply`), a grant before the
  checkpoint that is named under it (`Grant`). Grants and generations are of one coordinator. That
  one replica's checkpoint is before another's is implied by no frame: `SingleHistory` compares
  those of one.
- INV-7: backwards are of one rank. The rest compares sets.
- INV-8: compares sets.

A newcomer adds: its ranks have read a state before its leader claims it (`StateDigested`), and the
claim is before the announcement (`Claim`, `NewcomerReady`, `Announcement`). The statuses of all
older members are before a plan that admits it, its own included (`Admission`). The commit by which
it is proven is before the coordinator's event (`NewcomersProven`), and the end of the processes
whose slots it gets is before it is formed (`Ended`).
"""

from __future__ import annotations

from megatron_recover.observe.verify import (
    agreement,
    bounded_waits,
    decided_once,
    exactly_once,
    fencing,
    least_work,
    newcomers,
    no_corruption,
    single_history,
)
from megatron_recover.observe.verify.rule import Rule

RULES: tuple[tuple[str, str, tuple[type[Rule], ...]], ...] = (
    ("INV-1", "exactly once", exactly_once.RULES),
    ("INV-2", "agreement", (*agreement.RULES, *newcomers.AGREEMENT)),
    ("INV-3", "no corruption", no_corruption.RULES),
    ("INV-4", "decided once", (*decided_once.RULES, *newcomers.DECIDED_ONCE)),
    ("INV-5", "fencing", (*fencing.RULES, *newcomers.FENCING)),
    ("INV-6", "single history", (*single_history.RULES, *newcomers.SINGLE_HISTORY)),
    ("INV-7", "least work", (*least_work.RULES, *newcomers.LEAST_WORK)),
    ("INV-8", "bounded waits", bounded_waits.RULES),
)
"""Number, name and rules of every invariant that a trace can show."""
