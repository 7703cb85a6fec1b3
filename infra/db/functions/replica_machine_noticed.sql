-- Tells services that the platform reclaims a machine on which their replicas run.
create or replace function replica_machine_noticed() returns trigger language plpgsql as $$
begin
    perform service_wake(a.workload) from allocation as a where a.machine = new.id and a.released_at is null;
    return null;
end $$;
