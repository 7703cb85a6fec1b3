-- Tells a service about another phase of a replica's instance.
create or replace function replica_instance_changed() returns trigger language plpgsql as $$
begin
    perform service_wake(new.workload);
    return null;
end $$;
