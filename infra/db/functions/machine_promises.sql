-- Only slots that have a holder can be promised. The trigger is deferred, because a handover violates this temporarily.
create or replace function machine_promises() returns trigger language plpgsql as $$
begin
    if exists (select from machine where id = new.id and promised & ~held <> 0) then
        raise exception 'machine %: a promised slot has no holder', new.id using errcode = 'check_violation';
    end if;
    return null;
end $$;
