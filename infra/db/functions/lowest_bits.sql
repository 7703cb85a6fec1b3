-- Returns the `count` lowest set bits of `mask`, or all set bits if it has fewer.
create or replace function lowest_bits(mask bigint, count bigint) returns bigint language plpgsql immutable parallel safe as $$
declare
    rest bigint := mask;
begin
    if count >= bit_count(mask::bit(64)) then
        return mask;
    end if;
    for _ in 1..count loop
        rest := rest & (rest - 1);
    end loop;
    return mask & ~rest;
end $$;
