"""The search attributes that operators filter by in Temporal: names here, registered by `infra.search_attributes`."""

TENANT = "MizzenTenant"
REGION = "MizzenRegion"
PHASE = "MizzenPhase"
PRIORITY = "MizzenPriority"
REASON = "MizzenReason"
NAME = "MizzenName"
ATTEMPT = "MizzenAttempt"

KEYWORDS = (TENANT, REGION, PHASE, REASON, NAME)
INTEGERS = (PRIORITY, ATTEMPT)
