-- Tells a service about another phase of a replica's workload.
create or replace function replica_workload_changed() returns trigger language plpgsql as $$
begin
    perform service_wake(new.id);
    return null;
end $$;
