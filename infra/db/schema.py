"""Imports all models, and exports the metadata of all tables."""

from infra.db import array_rows as array_rows
from infra.db import capacity as capacity
from infra.db import console_sessions as console_sessions
from infra.db import costs as costs
from infra.db import deliveries as deliveries
from infra.db import dependencies as dependencies
from infra.db import lent_machines as lent_machines
from infra.db import logs as logs
from infra.db import lost_work as lost_work
from infra.db import models as models
from infra.db import placement_runs as placement_runs
from infra.db import pool_plans as pool_plans
from infra.db import reclaim as reclaim
from infra.db import restored_databases as restored_databases
from infra.db import services as services
from infra.db import tables as tables
from infra.db import task_sessions as task_sessions
from infra.db import tenants as tenants
from infra.db.base import Base

SCHEMA = Base.metadata
