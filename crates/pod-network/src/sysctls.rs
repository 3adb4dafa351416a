//! The sysctls that the pod network needs.

/// Why pods have no IPv6 addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoIpv6 {
    #[error("this kernel has no IPv6")]
    Kernel,
    #[error("IPv6 is switched off (net.ipv6.conf.default.disable_ipv6)")]
    Disabled,
}

/// Checks whether the kernel's settings let the node use IPv6.
pub(super) fn ipv6_is_usable() -> Result<(), NoIpv6> {
    match std::fs::read_to_string("/proc/sys/net/ipv6/conf/default/disable_ipv6") {
        Err(_) => Err(NoIpv6::Kernel),
        Ok(text) if text.trim() != "0" => Err(NoIpv6::Disabled),
        Ok(_) => Ok(()),
    }
}

/// Enables IPv6 on an interface without an automatic link-local address, through which pods would reach the machine.
pub(super) fn set_ipv6(interface: &str) {
    const NO_ADDRESS_OF_ITS_OWN: &str = "1";
    let base = format!("/proc/sys/net/ipv6/conf/{interface}");
    let _ = std::fs::write(format!("{base}/addr_gen_mode"), NO_ADDRESS_OF_ITS_OWN);
    let _ = std::fs::write(format!("{base}/accept_ra"), "0");
    let _ = std::fs::write(format!("{base}/disable_ipv6"), "0");
}

/// Makes the reverse path filter use the packet mark for its route lookup (`src_valid_mark`), as routing itself does. Without it a
/// machine with strict `rp_filter` finds no route back to a pod and drops the pod's packets.
pub(super) fn use_marks_in_source_checks() {
    let _ = std::fs::write("/proc/sys/net/ipv4/conf/all/src_valid_mark", "1");
}

/// Enables IP forwarding, which pods need to reach anything. The rules restrict it to the traffic of pods.
pub(super) fn forward_everything(ipv6: bool) {
    const HEED_ALL_THE_SAME: &str = "2";
    let _ = std::fs::write("/proc/sys/net/ipv4/ip_forward", "1");
    let all = "/proc/sys/net/ipv6/conf/all/forwarding";
    if !ipv6 || std::fs::read_to_string(all).is_ok_and(|text| text.trim() == "1") {
        return;
    }
    // A machine that forwards ignores router advertisements, from which it may have its own address and route, unless `accept_ra`
    // is 2.
    let interfaces = std::fs::read_dir("/proc/sys/net/ipv6/conf");
    for interface in interfaces.into_iter().flatten().flatten() {
        let setting = interface.path().join("accept_ra");
        if std::fs::read_to_string(&setting).is_ok_and(|text| text.trim() == "1") {
            let _ = std::fs::write(&setting, HEED_ALL_THE_SAME);
        }
    }
    let _ = std::fs::write(all, "1");
}
