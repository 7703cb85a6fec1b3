-- Only what somebody holds can be promised. Deferred, because a hand-over passes through a moment where it is not so.
create or replace function machine_promises() returns trigger language plpgsql as $$
begin
    if exists (select from machine where id = new.id and promised & ~held <> 0) then
        raise exception 'machine %: a promised slot has no holder', new.id using errcode = 'check_violation';
    end if;
    return null;
end $$;
