"""The buffer's tables. The service's own tables join the same METADATA and the same database file, so that one transaction can settle a step."""

from sqlalchemy import BigInteger, CheckConstraint, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, UniqueConstraint

METADATA = MetaData()

ADMITTED, READY, LEASED, TRAINED, DROPPED = "admitted", "ready", "leased", "trained", "dropped"
STATUSES = (ADMITTED, READY, LEASED, TRAINED, DROPPED)
HOLDS_PLACE = (ADMITTED, READY, LEASED)
"""A group holds one of its run's places in exactly these states."""

GROUPS = Table(
    "groups",
    METADATA,
    Column("group_id", String, primary_key=True),
    Column("run_id", String, nullable=False),
    Column("admission", Integer, nullable=False),
    Column("task_index", BigInteger, nullable=False),
    Column("task_seed", BigInteger, nullable=False),
    Column("status", String, nullable=False),
    Column("reason", String, doc="of a dropped group"),
    Column("admitted_version", Integer, nullable=False, doc="the run's published version when admitted"),
    Column("oldest_version", Integer, doc="of any sampled token, once ready"),
    Column("trained_version", Integer, doc="of the step that trained it"),
    Column("deadline_s", Float, nullable=False, doc="Unix seconds at which an admitted group is dropped"),
    Column("admitted_at_s", Float, nullable=False, doc="Unix seconds"),
    Column("ready_at_s", Float, doc="Unix seconds"),
    Column("settled_at_s", Float, doc="Unix seconds"),
    Column("num_episodes", Integer),
    Column("num_failed", Integer),
    Column("num_sampled", Integer, doc="sampled tokens of all its episodes"),
    Column("mean_reward", Float, doc="raw; outlives the payload, so that curves can be drawn"),
    Column("payload", LargeBinary, doc="the episodes (codec.py); of settled groups only where they are kept"),
    UniqueConstraint("run_id", "admission"),
    CheckConstraint("status IN ('admitted', 'ready', 'leased', 'trained', 'dropped')"),
    CheckConstraint("(status = 'dropped') = (reason IS NOT NULL)"),
    CheckConstraint("(status = 'trained') = (trained_version IS NOT NULL)"),
    Index("groups_by_status", "run_id", "status", "admission"),
)

CURSORS = Table(
    "cursors",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("seed", BigInteger, nullable=False),
    Column("num_tasks", BigInteger, nullable=False),
    Column("num_places", Integer, nullable=False),
    Column("task_tries", Integer, nullable=False, doc="failed groups of a task before it is quarantined"),
    Column("position", BigInteger, nullable=False, doc="of the next task in the run's endless order"),
    Column("num_admitted", Integer, nullable=False, doc="the next admission number"),
    Column("num_skipped", Integer, nullable=False, doc="positions passed over because their task was quarantined"),
)

TASK_FAILURES = Table(
    "task_failures",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("task_index", BigInteger, primary_key=True),
    Column("num_failed", Integer, nullable=False),
)
