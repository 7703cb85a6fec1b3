"""Names of the Temporal search attributes; `infra.search_attributes` registers them."""

TENANT = "MizzenTenant"
REGION = "MizzenRegion"
PHASE = "MizzenPhase"
PRIORITY = "MizzenPriority"
REASON = "MizzenReason"
NAME = "MizzenName"
ATTEMPT = "MizzenAttempt"

KEYWORDS = (TENANT, REGION, PHASE, REASON, NAME)
INTEGERS = (PRIORITY, ATTEMPT)
