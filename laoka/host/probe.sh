#!/bin/sh
# laoka's probe: reads what a host is and prints it as marked sections (the form is told in laoka/host/sections.py).
# It only reads. POSIX sh; every command has a deadline; one nvidia-smi at most, and none when one already hangs.
# As a plain user it reads less, and the sections that failed say so. Give it to `sh -s` on standard input, or run it.

clock() { # centiseconds since boot, without starting a program
    read -r up_now up_rest </proc/uptime
    NOW=${up_now%.*}${up_now#*.}
    while [ "$NOW" != "${NOW#0}" ] && [ -n "${NOW#0}" ]; do NOW=${NOW#0}; done
}

mark() { awk '{ n += length($0) + 1; if (n > 1500000) exit; print "|" $0 }'; }
mark_errors() { # no program of its own: mostly there is nothing to mark, and this runs once per section
    told=0
    while IFS= read -r line || [ -n "$line" ]; do
        told=$((told + ${#line} + 2))
        if [ "$told" -ge 3000 ]; then
            cat >/dev/null
            return
        fi
        printf '!%s\n' "$line"
    done
}

# The lines of a kernel log that say something about cards, links, windows and the boot; floods are counted, not copied.
mark_kernel() {
    awk '
    function out(line) { print "|" line }
    /severity=Correct|Correctable error|Corrected error/ && !/Uncorrect/ {
        if (/severity=Correct/) { corrected++; if (corrected <= 20) out($0); else { ring[corrected % 20] = $0 } }
        next
    }
    /API mismatch|has the version|same version\.$|make sure that this kernel module/ { if (++mismatch <= 40) out($0); next }
    /NVRM|[Nn]vidia|nouveau|vfio|pci[_ ]|pcieport|AER:|PCIe|BAR [0-9]|bridge window|PNP0A|DMAR|IOMMU/ ||
    /Linux version|Command line|DMI:|Secure boot|[Ll]ockdown|[Hh]ypervisor|Machine check|Hardware Error|EDAC/ ||
    /Out of memory|oom-kill|blocked for more than|soft lockup|hard LOCKUP|kernel BUG|Oops|I\/O error|thermal/ {
        if (++kept <= 5000) out($0); else tail[kept % 1000] = $0
    }
    END {
        for (i = corrected - 19; i <= corrected; i++) if (i > 20) out(ring[i % 20])
        for (i = kept - 999; i <= kept; i++) if (i > 5000) out(tail[i % 1000])
        if (corrected) out("# corrected AER reports: " corrected)
        if (mismatch) out("# lines about an API mismatch: " mismatch)
    }'
}

mark_cpu() { awk -F: '/^(model name|physical id|cpu cores|siblings|flags|processor)/ {
    if (/^processor/) { n++; next } if (!seen[$0]++) print "|" $0 } END { print "|threads: " n }'; }

# pid, state, parent, resident pages, start in ticks since boot, name (which may hold blanks and brackets)
mark_processes() { awk '{ a = index($0, "("); b = 0; for (i = length($0); i > 0; i--) if (substr($0, i, 1) == ")") { b = i; break }
    split(substr($0, b + 2), f, " "); print "|" $1, f[1], f[2], f[22], f[20], substr($0, a + 1, b - a - 1) }'; }

# bounded DEADLINE_S COMMAND...: run it, end it at its deadline. Busybox's own timeout leaves a watcher that holds our pipes
# open for a second after each command, so with it the watching is done here.
bounded() {
    if [ "$busybox" = no ]; then
        timeout -k 1 "$@"
        return
    fi
    seconds=$1
    shift
    "$@" &
    child=$!
    (
        exec >/dev/null 2>&1 4>&- 5>&- 6>&-
        sleep "$seconds"
        kill -TERM $child
        sleep 1
        kill -KILL $child
    ) &
    watcher=$!
    wait $child
    ended=$?
    kill $watcher 2>/dev/null
    return $ended
}

# sec NAME DEADLINE_S COMMAND...: run it, print its section. $via names the function that marks its output.
sec() {
    name=$1 limit=$2
    shift 2
    clock
    begun=$NOW
    left=$(((deadline - NOW) / 100))
    if [ "$left" -lt 1 ]; then
        echo "@skip $name the probe's own time was used up"
        return
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    if ! command -v "$1" >/dev/null 2>&1; then
        echo "@skip $name $1 is not installed"
        return
    fi
    echo "@section $name"
    # 4 is our output, 5 carries the exit status, 6 the errors.
    result=$({ { { bounded "$limit" "$@" 4>&- 5>&-; echo "rc=$?" >&5; } 2>&6 | "$via" >&4; } 6>&1 | mark_errors; } 5>&1)
    status=125
    IFS='
'
    for line in $result; do
        case $line in rc=*) status=${line#rc=} ;; *) printf '%s\n' "$line" ;; esac
    done
    unset IFS
    clock
    echo "@end $name rc=$status ms=$(((NOW - begun) * 10))"
}

# files NAME PATTERN FILE...: the lines that match, each with the name of its file.
files() {
    name=$1 pattern=$2
    shift 2
    set +f
    # shellcheck disable=SC2086 # the names are patterns on purpose
    set -- $*
    set -f
    sec "$name" 3 sh -c 'grep -HsE "$@"; test $? -le 2' grep "$pattern" "$@"
}

smi_begin() {
    smi=none
    command -v nvidia-smi >/dev/null 2>&1 || { smi_skip="nvidia-smi is not installed"; return; }
    case $stats in
    *"(nvidia-smi) D "*) smi_skip="an nvidia-smi already hangs in an uninterruptible read (D state): no second one is started"; return ;;
    esac
    for folder in /dev/shm /run /tmp /var/tmp; do
        tmp=$(mktemp -d "$folder/laoka-probe.XXXXXX" 2>/dev/null) && break
    done
    [ -n "$tmp" ] || { smi_skip="no folder to write its output to"; return; }
    smi=started
    clock
    smi_begun=$NOW
    # In the background, into files: a wedged driver holds it for ever, and it must not hold us nor our output.
    (
        exec 4>&- >"$tmp/out" 2>"$tmp/err"
        timeout -k 1 7 nvidia-smi -q -x
        echo $? >"$tmp/rc"
    ) 4>&- >/dev/null 2>&1 &
}

smi_end() {
    if [ "$smi" = none ]; then
        echo "@skip nvidia-smi-xml $smi_skip"
        return
    fi
    clock
    while [ ! -s "$tmp/rc" ] && [ "$NOW" -lt "$deadline" ]; do
        sleep 0.1 2>/dev/null || sleep 1
        clock
    done
    status=124
    [ -s "$tmp/rc" ] && read -r status <"$tmp/rc"
    echo "@section nvidia-smi-xml"
    mark <"$tmp/out"
    mark_errors <"$tmp/err"
    echo "@end nvidia-smi-xml rc=$status ms=$(((NOW - smi_begun) * 10))"
    rm -rf "$tmp"
}

main() {
    LC_ALL=C LANG=C PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    export LC_ALL LANG PATH
    set -f
    unset IFS
    exec 4>&1
    clock
    started=$NOW
    deadline=$((NOW + 880))
    via=mark
    tmp=
    echo "@laoka-probe 1"
    if ! command -v timeout >/dev/null 2>&1 || ! command -v awk >/dev/null 2>&1; then
        echo "@skip everything timeout or awk is not installed"
        echo "@done ms=0"
        return
    fi

    busybox=no
    case $(timeout --help 2>&1) in *BusyBox*) busybox=yes ;; esac

    sec probe 2 sh -c 'echo "uid=$(id -u)"; echo "epoch_s=$(date +%s)"; echo "uptime_s=$(cut -d" " -f1 /proc/uptime)"
        test -e /srv/laoka-sandbox/simulated && echo simulated=1; true'

    # PCI first: nothing that touches the driver comes before it, and links are still as idle as they were.
    dev=/sys/bus/pci/devices
    set +f
    for file in vendor device class subsystem_vendor subsystem_device revision resource enable numa_node boot_vga \
        current_link_speed current_link_width max_link_speed max_link_width power_state link/l1_aspm link/l0s_aspm \
        aer_dev_correctable aer_dev_nonfatal aer_dev_fatal reset_method; do
        wanted="$wanted $dev/*/$file"
    done
    set -f
    files pci-attributes '' "$wanted"
    sec pci-links 2 sh -c 'ls -l "$0"/; for d in "$0"/*; do test -e "$d/driver" && printf "%s\n" "$d/driver"; done | xargs -r ls -ld; true' $dev
    sec pci-config 2 sh -c 'for d in "$0"/*; do read -r v <"$d/vendor" || continue; [ "$v" = 0x10de ] || continue
        echo "${d##*/}" $(od -An -v -tx1 -N256 "$d/config"); done; true' $dev
    if [ -e /srv/laoka-sandbox/simulated ]; then
        echo "@skip iomem the memory map is that of the machine around the sandbox, not of the simulated board"
    else
        sec iomem 2 cat /proc/iomem
    fi

    via=mark_processes
    stats=$(bounded 2 sh -c 'cat /proc/[0-9]*/stat' 2>/dev/null)
    sec processes 2 sh -c 'cat /proc/[0-9]*/stat 2>/dev/null; true'
    via=mark
    smi_begin

    via=mark_kernel
    if [ -e /srv/laoka-sandbox/simulated ]; then # a sandbox host has no kernel log of its own, but records in that form
        # (what is no plain character is \xHH in a record; a line feed begins a line of its own, as dmesg shows it)
        sec dmesg 2 awk '/^[0-9]+,/ { split($0, head, ","); n = split(substr($0, index($0, ";") + 1), lines, "\\\\x0a")
            for (i = 1; i <= n; i++) if (lines[i] != "") printf "[%.6f] %s\n", head[3] / 1e6, lines[i] }' /srv/laoka-sandbox/kmsg
    else
        sec dmesg 2 dmesg
    fi
    sec journal-kernel 3 journalctl _TRANSPORT=kernel -n 8000 -o short-unix --no-pager -q
    via=mark
    sec boots 2 journalctl --list-boots --no-pager -q
    sec journal-previous-boot 2 journalctl -b -1 -n 40 -o short-unix --no-pager -q \
        -t kernel -t systemd -t systemd-shutdown -t systemd-journald -t systemd-logind
    sec lspci 2 lspci -Dnnvvv -d 10de:

    files dmi '' /sys/class/dmi/id/bios_vendor /sys/class/dmi/id/bios_version /sys/class/dmi/id/bios_date \
        /sys/class/dmi/id/board_vendor /sys/class/dmi/id/board_name /sys/class/dmi/id/board_version \
        /sys/class/dmi/id/sys_vendor /sys/class/dmi/id/product_name /sys/class/dmi/id/chassis_type
    sec dmidecode 2 dmidecode -t 4,9,16,17,39
    sec efi 2 sh -c 'test -d /sys/firmware/efi && echo efi=1 || echo efi=0
        od -An -tx1 -j4 -N1 /sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c 2>/dev/null | sed "s/^ */secure_boot=/"
        ls -l /sys/firmware/efi/efivars/ 2>/dev/null | grep " Setup-" ; true'
    sec secure-boot 2 mokutil --sb-state
    sec virt 2 sh -c 'if command -v systemd-detect-virt >/dev/null; then
            systemd-detect-virt --vm | sed "s/^/vm=/"; systemd-detect-virt --container | sed "s/^/container=/"; fi
        test -e /.dockerenv && echo dockerenv=1; test -e /run/.containerenv && echo containerenv=1
        test -e /proc/sys/fs/binfmt_misc/WSLInterop && echo wsl_interop=1; test -e /dev/dxg && echo dxg=1
        test -e /run/systemd/container && sed "s/^/container=/" /run/systemd/container; true'

    sec uname 2 uname -a
    sec os-release 2 sh -c 'cat /etc/os-release || cat /usr/lib/os-release'
    sec cmdline 2 cat /proc/cmdline
    via=mark_cpu
    sec cpuinfo 2 cat /proc/cpuinfo
    via=mark
    sec meminfo 2 cat /proc/meminfo
    files numa '' '/sys/devices/system/node/node[0-9]*/cpulist'
    sec glibc 2 getconf GNU_LIBC_VERSION
    sec python 2 sh -c 'for p in /usr/bin/python3 /usr/bin/python3.1? /usr/local/bin/python3.1?; do
        test -x "$p" && echo "$p $("$p" --version 2>&1)"; done; true'
    sec compiler 2 gcc --version

    sec boot-files 2 sh -c 'stat -c "%Y %s %n" /boot/vmlinuz-* /boot/initrd.img-* /boot/initramfs-*.img /etc/modprobe.d/* 2>/dev/null; true'
    sec kernels 2 sh -c 'for d in /lib/modules/*/; do d=${d%/}; test -e "$d/modules.dep" || test -e "$d/kernel" && echo "${d##*/}"; done; true'
    sec headers 2 sh -c 'for d in /lib/modules/*/build; do test -e "$d/Makefile" && d=${d%/build} && echo "${d##*/}"; done; true'
    # Debian's own packages call the file nvidia-current; `modprobe nvidia` finds it by a rule of theirs, modinfo does not.
    sec modinfo 3 sh -c 'for d in /lib/modules/*/; do test -d "$d" || continue; k=$(basename "$d") m=nvidia; echo "[$k]"
        modinfo -k "$k" nvidia-current >/dev/null 2>&1 && m=nvidia-current
        modinfo -k "$k" $m 2>&1 | grep -E "^(filename|version|license|signer|vermagic):|not found|ERROR"; done; true'
    sec modules 2 cat /proc/modules
    sec dkms-status 8 dkms status
    sec dkms-failures 2 sh -c 'test -e /var/log/apt/term.log || exit 0; grep -a "Bad return status for module build\|^Consult /var/lib/dkms" /var/log/apt/term.log | tail -n 8'
    files modprobe '^[^#]*(nouveau|nvidia|vfio)' '/etc/modprobe.d/*' '/lib/modprobe.d/*' '/usr/lib/modprobe.d/*' '/etc/modules-load.d/*' /etc/initramfs-tools/modules
    files grub '^[^#]*GRUB_' /etc/default/grub '/etc/default/grub.d/*'
    sec grubenv 2 sh -c 'cat /boot/grub/grubenv 2>/dev/null || cat /boot/grub2/grubenv'
    sec grub-menu 2 sh -c 'for f in /boot/grub/grub.cfg /boot/grub2/grub.cfg; do test -r "$f" && exec grep -E "^[[:space:]]*(menuentry|submenu) |set default=" "$f"; done; echo "no grub.cfg that may be read" >&2; exit 1'
    sec nvidia-proc 2 cat /proc/driver/nvidia/version
    # The loader knows them in other places too (containers mount them where they like); Debian's own packages have the version
    # only at the end of a chain of links.
    sec nvidia-libraries 2 sh -c 'PATH=$PATH:/sbin:/usr/sbin
        set -- /usr/lib/x86_64-linux-gnu/libnvidia-ml.so* /usr/lib/x86_64-linux-gnu/libcuda.so* /usr/lib64/libnvidia-ml.so* /usr/lib64/libcuda.so* \
            /usr/local/nvidia/lib64/libnvidia-ml.so* /usr/local/nvidia/lib64/libcuda.so* \
            $(ldconfig -p 2>/dev/null | sed -n "s/.*=> \(.*\/lib\(nvidia-ml\|cuda\)\.so\.[0-9].*\)/\1/p")
        ls -l "$@" 2>/dev/null; readlink -f "$@" 2>/dev/null; true'

    sec packages 3 dpkg-query -W -f '${Package} ${Version} ${db:Status-Abbrev} ${Architecture}\n' \
        '*nvidia*' 'libcuda*' 'cuda*' 'libcudnn*' 'linux-image*' 'linux-headers*' 'linux-modules*' 'linux-generic*' 'xserver-xorg-video-nouveau' \
        dkms unattended-upgrades rsyslog pciutils mokutil gcc 'python3.1*' docker.io docker-ce
    sec rpms 3 rpm -qa --qf '%{NAME} %{VERSION}-%{RELEASE} %{ARCH}\n' '*nvidia*' 'kernel*' 'cuda*' 'dkms*'
    sec holds 3 sh -c 'dpkg --get-selections | grep "[[:space:]]hold\$"; test $? -le 1'
    files apt-preferences '' /etc/apt/preferences '/etc/apt/preferences.d/*'
    files apt-sources '(nvidia|cuda)' '/etc/apt/sources.list' '/etc/apt/sources.list.d/*'
    sec apt-config 3 sh -c 'apt-config dump | grep -E "^(Unattended-Upgrade|APT::Periodic)"; true'
    # What is installed is asked for by name: a fixed list can't have every package that an upgrade could move.
    installed=$(bounded 2 dpkg-query -W -f '${db:Status-Status} ${Package}\n' '*nvidia*' 'libcuda*' 'linux-image*' 'linux-headers*' \
        'linux-generic*' 2>/dev/null | awk '$1 == "installed" { print $2 }')
    # When its lists are newer than its cache, apt builds that anew and writes 80 MB. This only reads, so it is told to write none.
    no_cache='-o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache='
    [ -e /var/cache/apt/pkgcache.bin ] && [ -z "$(bounded 2 find /var/lib/apt/lists /var/lib/dpkg/status /etc/apt/sources.list \
        /etc/apt/sources.list.d -maxdepth 1 -newer /var/cache/apt/pkgcache.bin 2>/dev/null)" ] && no_cache=
    # shellcheck disable=SC2086 # one word an option, one a name
    sec apt-policy 3 apt-cache $no_cache policy nvidia-driver-580-server nvidia-driver-580 nvidia-dkms-580-server nvidia-headless-580-server \
        nvidia-driver nvidia-driver-pinning-580 cuda-drivers cuda-drivers-580 cuda linux-image-generic linux-image-amd64 $installed

    sec services 2 systemctl show -p Id,LoadState,ActiveState,SubState,UnitFileState,NRestarts \
        nvidia-persistenced.service unattended-upgrades.service apt-daily-upgrade.timer apt-daily.timer qwen-serve.service \
        rsyslog.service nvidia-fabricmanager.service gdm.service lightdm.service docker.service qwen-watchdog.service \
        laoka-power.service qwen-guard.service
    sec failed-units 2 systemctl list-units --failed --no-legend --plain --no-pager
    # What laoka has put here: links, stamps, flags, the watchdog's state, deploys; and hashes of what units are made of.
    if [ -e /var/lib/laoka ] || [ -e /opt/laoka ]; then
        sec laoka 3 sh -c 'exec 2>/dev/null; s=/var/lib/laoka/stamps; d=/var/lib/laoka/deploys
            grep -Hs "" /opt/laoka/engines/current/laoka-complete /opt/laoka/engines/current/laoka-engine.json /etc/laoka/speculative.json \
                /var/lib/laoka/speculative.json /etc/qwen-serve/vllm.yaml /etc/qwen-serve/*/vllm.yaml /run/qwen-serve/state.json \
                /run/laoka/watchdog.json /var/lib/laoka/watchdog/alert-test.json $s/*.config $d/lock
            test -e $d/ledger && tail -n 20 $d/ledger | sed "s|^|$d/ledger:|"
            test -s $d/lock && { read -r line; read -r boot pid rest; } <$d/lock && read -r boot </proc/sys/kernel/random/boot_id &&
                echo "@owner $boot $(date +%s) $(sed "s/.*) //" /proc/$pid/stat | cut -d " " -f 20)"
            set -- $(sed -s 1d $s/*.config | sort -u)
            for p in /opt/laoka/agent/current /opt/laoka/engines/current /srv/laoka/models/current /srv/laoka/models/drafter "$@"; do
                test -L "$p" && echo "@link $p $(readlink -f "$p")"; done
            test $# = 0 || sha256sum "$@" | sed "s|^|@hash |"
            true'
    else
        echo "@skip laoka nothing of it is installed here"
    fi
    sec disks 3 df -kP
    sec inodes 3 df -iP
    sec log-size 2 du -sk /var/log
    sec journal-size 2 journalctl --disk-usage
    files journald '^[^#;]' /etc/systemd/journald.conf '/etc/systemd/journald.conf.d/*' '/run/systemd/journald.conf.d/*'
    files rsyslog-filters '(AER|RxErr|BadTLP|PCIe Bus Error)' /etc/rsyslog.conf '/etc/rsyslog.d/*'
    sec installs 3 sh -c 'exec 2>/dev/null; ls -d /usr/local/cuda* /opt/cuda* /etc/alternatives/cuda; readlink /usr/local/cuda
        ls -d /usr/local/lib/python3*/*-packages/*.dist-info /usr/lib/python3/dist-packages/*.dist-info /opt/*/lib/python3*/site-packages/*.dist-info \
            /opt/*/*/lib/python3*/site-packages/*.dist-info /opt/*/*/*/lib/python3*/site-packages/*.dist-info /srv/*/lib/python3*/site-packages/*.dist-info \
            /root/*/lib/python3*/site-packages/*.dist-info /root/.local/lib/python3*/site-packages/*.dist-info /home/*/*/lib/python3*/site-packages/*.dist-info \
            /home/*/*/*/lib/python3*/site-packages/*.dist-info /home/*/.local/lib/python3*/site-packages/*.dist-info |
            grep -E "/(torch|vllm|1cat_vllm|revolta[_a-z]*|flash_attn[_a-z0-9]*|triton|nvidia_cuda_runtime[_a-z0-9]*)-[^/]*$"; true'
    files hwmon '' '/sys/class/hwmon/hwmon*/name' '/sys/class/hwmon/hwmon*/temp*_input' '/sys/class/hwmon/hwmon*/fan*_input' '/sys/class/hwmon/hwmon*/pwm[0-9]'
    smi_end
    clock
    echo "@done ms=$(((NOW - started) * 10))"
}

main </dev/null
