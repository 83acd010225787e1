"""`python -m async_driver train SETTINGS.toml ...`: the command with the roles of `async_roles`.

Like the real command, it runs under the supervisor, which starts this module again.
"""

import sys
from functools import partial

from rl_async_trainer import main, supervisor, training_run

FACTORIES = {
    "rollouter": "async_roles:ScriptedRollouter",
    "learner": "async_roles:ScriptedLearnerHost",
    "teachers": "async_roles:RaisingTeachers",
}

if __name__ == "__main__":
    made = partial(training_run.AsyncTrainingRun, factories=FACTORIES)
    training_run.AsyncTrainingRun = made  # type: ignore[assignment,misc]
    supervisor.Supervisor = partial(supervisor.Supervisor, module="async_driver")
    sys.exit(main.main())
